// What laws.py and truncation.py do with every logit of a row, for CPUs with AVX-512. Called through cpu_sampling.py.
//
// Rows are independent of one another and are shared out among OpenMP's threads. Sums and scores are in double
// precision, as in the twins in torch: the order of a sum or another library's logarithm changes the last bit of one,
// and with it a token only where two scores or sums agree in all the others.
//
// OpenMP's functions are left undefined on purpose, as in cpu_kernels.c.

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define INLINE TARGET static inline __attribute__((always_inline))

enum {
    LANES = 16,         // float32 values in a register
    NOISE_BLOCK = 256,  // token ids whose noise comes together, as in rng.py
};

int specgw_is_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// One row's logits, bfloat16 or float32.
typedef struct {
    const void *logits;
    int64_t size;
    int is_bf16;
} Row;

INLINE Row row_at(const void *logits, int is_bf16, int64_t row, int64_t size) {
    return (Row){(const char *)logits + row * size * (is_bf16 ? 2 : 4), size, is_bf16};
}

// The lanes that exist of the next ones.
INLINE __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : (1u << left) - 1; }

// Logits from `id` on, float32; -inf in lanes that do not exist.
INLINE __m512 load(Row row, int64_t id, __mmask16 mask) {
    __m512 none = _mm512_set1_ps(-INFINITY);
    if (!row.is_bf16) return _mm512_mask_loadu_ps(none, mask, (const float *)row.logits + id);
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)row.logits + id));
    return _mm512_mask_mov_ps(none, mask, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
}

INLINE int64_t num_blocks_of(int64_t size) { return (size + NOISE_BLOCK - 1) / NOISE_BLOCK; }

INLINE int64_t block_end(Row row, int64_t block) {
    int64_t end = (block + 1) * NOISE_BLOCK;
    return end < row.size ? end : row.size;
}

// maxima[num_rows][num_blocks] are the largest logits of each block of logits[num_rows][size]; NaN if one is.
TARGET void specgw_block_maxima(const void *logits, int64_t is_bf16, float *maxima, int64_t num_rows, int64_t size) {
    int64_t num_blocks = num_blocks_of(size);
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < num_rows * num_blocks; item++) {
        Row row = row_at(logits, is_bf16, item / num_blocks, size);
        int64_t block = item % num_blocks, end = block_end(row, block);
        __m512 largest = _mm512_set1_ps(-INFINITY);
        __mmask16 broken = 0;
        for (int64_t id = block * NOISE_BLOCK; id < end; id += LANES) {
            __m512 values = load(row, id, lanes(end - id));
            broken |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
            largest = _mm512_max_ps(largest, values);
        }
        maxima[item] = broken ? NAN : _mm512_reduce_max_ps(largest);
    }
}

// The first of the largest values, or of those that are NaN.
INLINE int64_t first_largest(const float *values, int64_t count) {
    __m512 none = _mm512_set1_ps(-INFINITY), largest = none;
    for (int64_t i = 0; i < count; i += LANES) {
        __m512 some = _mm512_mask_loadu_ps(none, lanes(count - i), values + i);
        __mmask16 broken = _mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q);
        if (broken) return i + __builtin_ctz(broken);
        largest = _mm512_max_ps(largest, some);
    }
    __m512 best = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int64_t i = 0; i < count; i += LANES) {
        __m512 some = _mm512_mask_loadu_ps(none, lanes(count - i), values + i);
        __mmask16 equal = _mm512_cmp_ps_mask(some, best, _CMP_EQ_OQ);
        if (equal) return i + __builtin_ctz(equal);
    }
    return 0;
}

// Copies a block of logits; returns how many they are.
INLINE int64_t copy_block(Row row, int64_t block, float *logits) {
    int64_t first = block * NOISE_BLOCK, end = block_end(row, block);
    for (int64_t id = first; id < end; id += LANES) _mm512_storeu_ps(logits + id - first, load(row, id, lanes(end - id)));
    return end - first;
}

// token_ids[num_rows] are the first ids with the largest logit of each row.
TARGET void specgw_first_maximum(const void *logits, int64_t is_bf16, const float *maxima, int64_t *token_ids,
                                 int64_t num_rows, int64_t size) {
    int64_t num_blocks = num_blocks_of(size);
    for (int64_t i = 0; i < num_rows; i++) {
        float values[NOISE_BLOCK];
        int64_t block = first_largest(maxima + i * num_blocks, num_blocks);
        int64_t count = copy_block(row_at(logits, is_bf16, i, size), block, values);
        token_ids[i] = block * NOISE_BLOCK + first_largest(values, count);
    }
}

// A block of logits without those that are taken; returns how many they are.
INLINE int64_t copy_rest(Row row, int64_t block, const int64_t *taken, int64_t num_taken, float *logits) {
    int64_t count = copy_block(row, block, logits);
    for (int64_t i = 0; i < num_taken; i++)
        if (taken[i] / NOISE_BLOCK == block) logits[taken[i] % NOISE_BLOCK] = -INFINITY;
    return count;
}

// ids[num_rows][1 + count] begin with one id each; the rest are set to those with the largest of the other logits, which
// are values[num_rows][count], the largest first.
TARGET void specgw_next_maxima(const void *logits, int64_t is_bf16, const float *maxima, int64_t *ids, float *values,
                               int64_t count, int64_t num_rows, int64_t size) {
    int64_t num_blocks = num_blocks_of(size);
#pragma omp parallel if (num_rows > 1)
    {
        float *left = malloc(num_blocks * sizeof *left), rest[NOISE_BLOCK];
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_rows; i++) {
            Row row = row_at(logits, is_bf16, i, size);
            int64_t *taken = ids + i * (1 + count);
            memcpy(left, maxima + i * num_blocks, num_blocks * sizeof *left);
            for (int64_t n = 1; n <= count; n++) {
                int64_t block = taken[n - 1] / NOISE_BLOCK;
                int64_t num_left = copy_rest(row, block, taken, n, rest);
                left[block] = rest[first_largest(rest, num_left)];
                block = first_largest(left, num_blocks);
                num_left = copy_rest(row, block, taken, n, rest);
                int64_t place = first_largest(rest, num_left);
                taken[n] = block * NOISE_BLOCK + place;
                values[i * count + n - 1] = rest[place];
            }
        }
        free(left);
    }
}

// e to the power of x, to the precision of float64. Below -708 it is 0.
INLINE __m512d exponential(__m512d x) {
    static const double series[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                    1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                                    1.0 / 6,          1.0 / 2,         1.0,            1.0};  // Taylor's
    __m512d power = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634)), 0);
    __m512d rest = _mm512_fnmadd_pd(power, _mm512_set1_pd(0.69314718036912382), x);  // ln 2 in two parts
    rest = _mm512_fnmadd_pd(power, _mm512_set1_pd(1.9082149292705877e-10), rest);
    __m512d sum = _mm512_set1_pd(series[0]);
    for (int i = 1; i < 14; i++) sum = _mm512_fmadd_pd(sum, rest, _mm512_set1_pd(series[i]));  // |rest| <= ln(2) / 2
    __mmask8 vanishes = _mm512_cmp_pd_mask(x, _mm512_set1_pd(-708), _CMP_NGE_UQ);
    return _mm512_mask_mov_pd(_mm512_scalef_pd(sum, power), vanishes, _mm512_setzero_pd());
}

// How probable logits are, relative to the row's largest one.
typedef struct {
    double best, temperature;
} Scale;

INLINE __m512d weights_of(__m256 logits, Scale scale) {
    __m512d below = _mm512_sub_pd(_mm512_cvtps_pd(logits), _mm512_set1_pd(scale.best));
    return exponential(_mm512_mul_pd(below, _mm512_set1_pd(1 / scale.temperature)));
}

INLINE __m512d weights_of_lanes(__m512 logits, Scale scale) {
    __m512d low = weights_of(_mm512_castps512_ps256(logits), scale);
    return _mm512_add_pd(low, weights_of(_mm512_extractf32x8_ps(logits, 1), scale));
}

// The sum of all tokens' weights.
INLINE double total_weight(Row row, Scale scale) {
    __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    for (int64_t id = 0; id < row.size; id += 2 * LANES) {
        int64_t left = row.size - id;
        sums[0] = _mm512_add_pd(sums[0], weights_of_lanes(load(row, id, lanes(left)), scale));
        if (left > LANES)
            sums[1] = _mm512_add_pd(sums[1], weights_of_lanes(load(row, id + LANES, lanes(left - LANES)), scale));
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1]));
}

// Logits in no order and the weight of each, with room for one more register.
typedef struct {
    float *logits;
    double *weights;
    int64_t count;
} Candidates;

// Collects the logits that reach a floor, from the blocks that have any.
INLINE void collect(Row row, const float *maxima, float floor, Candidates *found) {
    found->count = 0;
    for (int64_t block = 0; block < num_blocks_of(row.size); block++) {
        if (!(maxima[block] >= floor)) continue;
        int64_t end = block_end(row, block);
        for (int64_t id = block * NOISE_BLOCK; id < end; id += LANES) {
            __mmask16 exists = lanes(end - id);
            __m512 values = load(row, id, exists);
            __mmask16 reaches = _mm512_mask_cmp_ps_mask(exists, values, _mm512_set1_ps(floor), _CMP_GE_OQ);
            // Not the instruction that compresses to memory: it takes a hundred cycles on some CPUs.
            _mm512_storeu_ps(found->logits + found->count, _mm512_maskz_compress_ps(reaches, values));
            found->count += __builtin_popcount(reaches);
        }
    }
}

// Weighs the candidates; returns the sum.
INLINE double weigh(Candidates *found, Scale scale) {
    double sum = 0;
    for (int64_t i = 0; i < found->count; i += LANES / 2) {
        int64_t left = found->count - i;
        __mmask8 exists = left >= LANES / 2 ? 0xff : (1u << left) - 1;
        __m512d weights = weights_of(_mm256_maskz_loadu_ps(exists, found->logits + i), scale);
        _mm512_storeu_pd(found->weights + i, weights);
        sum += _mm512_mask_reduce_add_pd(exists, weights);
    }
    return sum;
}

static void weigh_alike(Candidates *found) {
    for (int64_t i = 0; i < found->count; i++) found->weights[i] = 1;
}

static void swap(Candidates *found, int64_t i, int64_t j) {
    float logit = found->logits[i];
    double weight = found->weights[i];
    found->logits[i] = found->logits[j];
    found->weights[i] = found->weights[j];
    found->logits[j] = logit;
    found->weights[j] = weight;
}

static float middle(float a, float b, float c) {
    float low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

// The least logit of the candidates such that all larger ones together weigh less than what is wanted.
//
// That is the last of the fewest largest ones that weigh as much. Hoare's quickselect (1961), by weight.
static float last_kept(Candidates *found, double wanted) {
    int64_t first = 0, end = found->count;
    double before = 0;  // the weight of those that are larger than all from `first` to `end`
    for (;;) {
        const float *logits = found->logits;
        float pivot = middle(logits[first], logits[first + (end - first) / 2], logits[end - 1]);
        int64_t larger = first, smaller = end;  // where those that are larger end and those that are smaller begin
        double weight_larger = 0, weight_equal = 0;
        for (int64_t i = first; i < smaller;) {
            if (logits[i] > pivot) {
                weight_larger += found->weights[i];
                swap(found, i++, larger++);
            } else if (logits[i] < pivot) {
                swap(found, i, --smaller);
            } else {
                weight_equal += found->weights[i++];
            }
        }
        if (before + weight_larger >= wanted && larger > first) {
            end = larger;
        } else if (before + weight_larger + weight_equal >= wanted || smaller == end) {
            return pivot;
        } else {
            before += weight_larger + weight_equal;
            first = smaller;
        }
    }
}

// What one row's tokens are kept by, as in truncation.py.
typedef struct {
    double min_p, top_p;
    int64_t top_k;
} Truncation;

// The logit of a token `weight` times as probable as the most probable one.
static float logit_of(double weight, Scale scale) {
    return weight == 0 ? -INFINITY : (float)(scale.best + scale.temperature * log(weight));
}

// Relative to the most probable token's: how far down there may be enough candidates.
static const double WEIGHTS[] = {1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 0};
enum { NUM_WEIGHTS = sizeof WEIGHTS / sizeof *WEIGHTS };

// The k-th largest logit.
TARGET static float kth_largest(Row row, const float *maxima, Scale scale, int64_t k, Candidates *found) {
    int64_t num_blocks = num_blocks_of(row.size);
    if (k <= num_blocks) {  // k blocks have a logit as large as the k-th largest maximum
        memcpy(found->logits, maxima, num_blocks * sizeof *maxima);
        found->count = num_blocks;
        weigh_alike(found);
        collect(row, maxima, last_kept(found, k), found);
    } else {
        found->count = 0;
        for (int i = 0; i < NUM_WEIGHTS && found->count < k; i++)
            collect(row, maxima, logit_of(WEIGHTS[i], scale), found);
    }
    weigh_alike(found);
    return last_kept(found, k);
}

// The smallest logit that top-p keeps of all.
TARGET static float top_p_of_all(Row row, const float *maxima, Scale scale, double top_p, Candidates *found) {
    double wanted = top_p * total_weight(row, scale);
    for (int i = 0; i < NUM_WEIGHTS; i++) {
        collect(row, maxima, logit_of(WEIGHTS[i], scale), found);
        if (weigh(found, scale) >= wanted) break;
    }
    return last_kept(found, wanted);
}

// The smallest logit that is kept; -inf for all.
TARGET static float smallest_kept(Row row, const float *maxima, double temperature, Truncation kept,
                                  Candidates *found) {
    int has_top_k = 0 < kept.top_k && kept.top_k < row.size;
    if (!has_top_k && kept.top_p >= 1 && kept.min_p == 0) return -INFINITY;
    float best = maxima[first_largest(maxima, num_blocks_of(row.size))];
    if (!isfinite(best)) return -INFINITY;
    Scale scale = {best, temperature};
    if (!has_top_k && kept.min_p == 0) return top_p_of_all(row, maxima, scale, kept.top_p, found);
    float floor = logit_of(kept.min_p, scale);
    if (has_top_k) {
        float kth = kth_largest(row, maxima, scale, kept.top_k, found);
        floor = kth > floor ? kth : floor;
    }
    if (kept.top_p >= 1) return floor;
    collect(row, maxima, floor, found);
    double total = weigh(found, scale);
    return last_kept(found, kept.top_p * total);
}

// floors[num_rows] are the smallest logits that each row's min-p (shares[0]), top-k (counts) and top-p (shares[1]) keep.
TARGET void specgw_smallest_kept(const void *logits, int64_t is_bf16, const float *maxima, const double *temperatures,
                                 const double *shares, const int64_t *counts, float *floors, int64_t num_rows,
                                 int64_t size) {
#pragma omp parallel
    {
        Candidates found = {malloc((size + LANES) * sizeof(float)), malloc((size + LANES) * sizeof(double)), 0};
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_rows; i++) {
            Row row = row_at(logits, is_bf16, i, size);
            Truncation kept = {shares[i], shares[num_rows + i], counts[i]};
            floors[i] = smallest_kept(row, maxima + i * num_blocks_of(size), temperatures[i], kept, &found);
        }
        free(found.logits);
        free(found.weights);
    }
}

// Leaves the logits[size] whose bit in the mask is set, and -inf for others; if that is -inf for all, 0 for those.
TARGET void specgw_keep_allowed(float *logits, const uint32_t *mask, int64_t size) {
    __m512 none = _mm512_set1_ps(-INFINITY);
    __mmask16 is_left = 0;
    for (int64_t id = 0; id < size; id += LANES) {
        __mmask16 exists = lanes(size - id), allowed = exists & mask[id / 32] >> id % 32;
        __m512 kept = _mm512_mask_loadu_ps(none, allowed, logits + id);
        is_left |= _mm512_cmp_ps_mask(kept, none, _CMP_NEQ_UQ);
        _mm512_mask_storeu_ps(logits + id, exists, kept);
    }
    for (int64_t id = 0; !is_left && id < size; id++)
        if (mask[id / 32] >> id % 32 & 1) logits[id] = 0;
}

// What the random numbers of a row are for, as in rng.py.
typedef struct {
    uint32_t seed_low, seed_high, position, round;
    uint32_t stream;
} Key;

typedef struct {
    uint32_t word[4];
} Words;

enum { OF_BLOCK = 1, OF_TOKEN = 2 };

// Philox4x32-10 for one index of a kind.
static inline Words philox(Key key, uint32_t index, uint32_t kind) {
    uint32_t c0 = index, c1 = key.position, c2 = 4 * key.stream + kind, c3 = key.round;
    uint32_t k0 = key.seed_low, k1 = key.seed_high;
    for (int i = 0; i < 10; i++) {
        uint64_t first = (uint64_t)c0 * 0xD2511F53, second = (uint64_t)c2 * 0xCD9E8D57;
        c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)second;
        c3 = (uint32_t)first;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return (Words){{c0, c1, c2, c3}};
}

// The least noise of a block of ids, and which of them has it.
typedef struct {
    double noise, log_noise, bound;  // no token of the block has a higher score than the bound
    int64_t place;
} Least;

static Least least_noise(Key key, int64_t block, float largest, double temperature) {
    Words words = philox(key, block, OF_BLOCK);
    uint64_t high = words.word[0], low = words.word[1];
    double noise = -log(((double)(high << 20 | low >> 12) + 0.5) * 0x1p-52) / NOISE_BLOCK;
    double log_noise = log(noise);
    return (Least){noise, log_noise, largest / temperature - log_noise, words.word[2] % NOISE_BLOCK};
}

static double noise_of(Key key, int64_t id, Least least) {
    if (id % NOISE_BLOCK == least.place) return least.noise;
    return least.noise - log((philox(key, id / 4, OF_TOKEN).word[id % 4] + 0.5) * 0x1p-32);
}

typedef struct {
    double score;
    int64_t id;
} Choice;

static const double SLACK = 1e-9;  // for a logarithm that is not quite monotone

// The best of what was chosen before and the tokens of a block.
TARGET static Choice best_of_block(Choice best, Row row, Key key, int64_t block, Least least, float floor,
                                   double temperature) {
    float logits[NOISE_BLOCK];
    int64_t count = copy_block(row, block, logits);
    for (int64_t i = 0; i < count; i++) {
        int64_t id = block * NOISE_BLOCK + i;
        double x = logits[i];
        if (x < floor || x / temperature - least.log_noise < best.score - SLACK) continue;
        double score = x / temperature - log(noise_of(key, id, least));
        if (score > best.score || (score == best.score && id < best.id)) best = (Choice){score, id};
    }
    return best;
}

// The id with the highest log probability less the logarithm of its noise. The largest logit is a finite number.
TARGET static int64_t draw(Row row, const float *maxima, float floor, double temperature, Key key, Least *least) {
    int64_t num_blocks = num_blocks_of(row.size), likely = -1;
    for (int64_t block = 0; block < num_blocks; block++) {
        if (maxima[block] == -INFINITY || maxima[block] < floor) continue;
        least[block] = least_noise(key, block, maxima[block], temperature);
        if (likely < 0 || least[block].bound > least[likely].bound) likely = block;
    }
    Choice best = {-INFINITY, row.size};
    best = best_of_block(best, row, key, likely, least[likely], floor, temperature);
    for (int64_t block = 0; block < num_blocks; block++) {
        if (block == likely || maxima[block] == -INFINITY || maxima[block] < floor) continue;
        if (least[block].bound >= best.score - SLACK)
            best = best_of_block(best, row, key, block, least[block], floor, temperature);
    }
    return best.id;
}

// Draws token_ids[num_rows], one from each row's law; leaves those whose largest logit is not a finite number.
TARGET void specgw_draw(const void *logits, int64_t is_bf16, const float *maxima, const float *floors,
                        const double *temperatures, const int64_t *seeds, const int64_t *positions,
                        const int64_t *rounds, int64_t stream, int64_t *token_ids, int64_t num_rows, int64_t size) {
    int64_t num_blocks = num_blocks_of(size);
#pragma omp parallel
    {
        Least *least = malloc(num_blocks * sizeof *least);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_rows; i++) {
            const float *own = maxima + i * num_blocks;
            if (!isfinite(own[first_largest(own, num_blocks)])) continue;
            Key key = {seeds[i], seeds[i] >> 32, positions[i], rounds[i], stream};
            token_ids[i] = draw(row_at(logits, is_bf16, i, size), own, floors[i], temperatures[i], key, least);
        }
        free(least);
    }
}

#else

int specgw_is_supported(void) { return 0; }

#endif
