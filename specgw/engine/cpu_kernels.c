// The decoder's hot operators for CPUs with AVX-512 BF16 and VNNI. Called through cpu_kernels.py.
//
// A step of one or a few rows reads every weight once and computes little: its limit is the memory's bandwidth.
// oneDNN's kernels reach half of it for one row (2 cores, AMD Zen 4: 1.6 ms for 55 MB that take 0.8 ms to read).
// Here the weights lie in the order of the reads, one stream for each thread, prefetched across pages.
//
// OpenMP's functions are left undefined on purpose: they are found in the runtime that torch has loaded, so that both
// share one pool of threads.

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")))
#define INLINE TARGET static inline __attribute__((always_inline))

typedef uint16_t bf16;

enum {
    LANES = 16,       // float32 values in a register
    COLUMNS = 3,      // registers of output columns that are computed together
    BLOCK = COLUMNS * LANES,
    ROWS = 8,         // input rows that are computed together: 24 sums, 3 weights and an input fit the 32 registers
    CHUNK = 128,      // pairs of inputs before the next rows take their turn, so that weights stay in the L1 cache
    SPAN = 1024,      // values that one thread computes at least
    LINE = 32,        // bfloat16 values in a cache line, and in a register
    AHEAD = 4096,     // bytes ahead of the weights in use that are prefetched into the L2 cache
};

int specgw_is_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

INLINE __m512 load(const bf16 *from, __mmask16 mask) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE void store(bf16 *to, __mmask16 mask, __m512 value) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

// The lanes that exist of the next ones.
INLINE __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : (1u << left) - 1; }

// Adds the products of `rows` input rows and one block of weights over `pairs` pairs of inputs to sums[rows][BLOCK].
// For each pair `lines` cache lines of what follows `ahead` are prefetched.
INLINE void add_products(int rows, int lines, const bf16 *x, int64_t size, const bf16 *weight, int64_t pairs,
                         float *sums, const bf16 *ahead) {
    __m512 sum[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < COLUMNS; j++) sum[r][j] = _mm512_loadu_ps(sums + r * BLOCK + j * LANES);
    for (int64_t pair = 0; pair < pairs; pair++, weight += 2 * BLOCK, ahead += LINE * lines) {
        __m512bh w[COLUMNS];
        for (int j = 0; j < lines; j++) _mm_prefetch((const char *)(ahead + LINE * j), _MM_HINT_T1);
        for (int j = 0; j < COLUMNS; j++) w[j] = (__m512bh)_mm512_loadu_si512(weight + LINE * j);
        for (int r = 0; r < rows; r++) {
            int32_t inputs;
            memcpy(&inputs, x + r * size + 2 * pair, sizeof inputs);
            __m512bh both = (__m512bh)_mm512_set1_epi32(inputs);
            for (int j = 0; j < COLUMNS; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], w[j], both);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < COLUMNS; j++) _mm512_storeu_ps(sums + r * BLOCK + j * LANES, sum[r][j]);
}

// The compiler keeps the sums in registers only if it knows the number of rows.
INLINE void add_products_of(int rows, int lines, const bf16 *x, int64_t size, const bf16 *weight, int64_t pairs,
                            float *sums, const bf16 *ahead) {
    switch (rows) {
        case 1: add_products(1, lines, x, size, weight, pairs, sums, ahead); break;
        case 2: add_products(2, lines, x, size, weight, pairs, sums, ahead); break;
        case 3: add_products(3, lines, x, size, weight, pairs, sums, ahead); break;
        case 4: add_products(4, lines, x, size, weight, pairs, sums, ahead); break;
        case 5: add_products(5, lines, x, size, weight, pairs, sums, ahead); break;
        case 6: add_products(6, lines, x, size, weight, pairs, sums, ahead); break;
        case 7: add_products(7, lines, x, size, weight, pairs, sums, ahead); break;
        default: add_products(ROWS, lines, x, size, weight, pairs, sums, ahead);
    }
}

// One block of output columns for up to ROWS rows, which read the weights once: sums[num_rows][BLOCK].
TARGET static void linear_few(const bf16 *x, int64_t num_rows, int64_t size, const bf16 *weight, float *sums) {
    memset(sums, 0, num_rows * BLOCK * sizeof *sums);
    add_products_of(num_rows, COLUMNS, x, size, weight, size / 2, sums, weight + AHEAD / sizeof *weight);
}

// The same for any number of rows, which take turns with a chunk of the weights. The first two tiles of rows prefetch
// the next chunk.
TARGET static void linear_many(const bf16 *x, int64_t num_rows, int64_t size, const bf16 *weight, float *sums) {
    int64_t pairs = size / 2, num_tiles = (num_rows + ROWS - 1) / ROWS, tile = (num_rows + num_tiles - 1) / num_tiles;
    memset(sums, 0, num_rows * BLOCK * sizeof *sums);
    for (int64_t first = 0; first < pairs; first += CHUNK, weight += CHUNK * 2 * BLOCK) {
        int64_t some = pairs - first < CHUNK ? pairs - first : CHUNK;
        const bf16 *ahead = weight + CHUNK * 2 * BLOCK;
        for (int64_t row = 0; row < num_rows; row += tile, ahead = row <= tile ? ahead + CHUNK * 2 * LINE : weight) {
            int rows = num_rows - row < tile ? num_rows - row : tile;
            add_products_of(rows, 2, x + row * size + 2 * first, size, weight, some, sums + row * BLOCK, ahead);
        }
    }
}

// output[num_rows][num_columns] = x[num_rows][size] @ weight.T (+ bias) (+ residual), all bfloat16; sums in float32.
//
// `weight` is [ceil(num_columns / 64)][size / 2][64][2], `bias` [num_columns] or null, `residual` as output or null.
TARGET void specgw_linear(const bf16 *x, const bf16 *weight, const bf16 *bias, const bf16 *residual, bf16 *output,
                          int64_t num_rows, int64_t num_columns, int64_t size) {
    int64_t num_blocks = num_rows ? (num_columns + BLOCK - 1) / BLOCK : 0;
#pragma omp parallel
    {
        float few[ROWS * BLOCK], *sums = num_rows > ROWS ? malloc(num_rows * BLOCK * sizeof *sums) : few;
#pragma omp for schedule(static)
        for (int64_t block = 0; block < num_blocks; block++) {
            (num_rows > ROWS ? linear_many : linear_few)(x, num_rows, size, weight + block * BLOCK * size, sums);
            for (int64_t row = 0; row < num_rows; row++)
                for (int64_t c = block * BLOCK, j = 0; j < BLOCK && c < num_columns; j += LANES, c += LANES) {
                    __mmask16 mask = lanes(num_columns - c);
                    __m512 sum = _mm512_loadu_ps(sums + row * BLOCK + j);
                    if (bias) sum = _mm512_add_ps(sum, load(bias + c, mask));
                    if (residual) sum = _mm512_add_ps(sum, load(residual + row * num_columns + c, mask));
                    store(output + row * num_columns + c, mask, sum);
                }
        }
        if (sums != few) free(sums);
    }
}

// Adds the products of `rows` rows of unsigned bytes and one block of int8 weights over `quads` quads of inputs.
INLINE void add_int8_products(int rows, const uint8_t *x, int64_t size, const int8_t *weight, int64_t quads,
                              int32_t *sums) {
    __m512i sum[ROWS][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < COLUMNS; j++) sum[r][j] = _mm512_setzero_si512();
    for (int64_t quad = 0; quad < quads; quad++, weight += 4 * BLOCK) {
        __m512i w[COLUMNS];
        for (int j = 0; j < COLUMNS; j++) {
            _mm_prefetch((const char *)(weight + AHEAD + 64 * j), _MM_HINT_T1);
            w[j] = _mm512_loadu_si512(weight + 64 * j);
        }
        for (int r = 0; r < rows; r++) {
            int32_t inputs;
            memcpy(&inputs, x + r * size + 4 * quad, sizeof inputs);
            __m512i all = _mm512_set1_epi32(inputs);
            for (int j = 0; j < COLUMNS; j++) sum[r][j] = _mm512_dpbusd_epi32(sum[r][j], all, w[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < COLUMNS; j++) _mm512_storeu_si512(sums + r * BLOCK + j * LANES, sum[r][j]);
}

TARGET static void add_int8_products_of(int rows, const uint8_t *x, int64_t size, const int8_t *weight, int64_t quads,
                                        int32_t *sums) {
    switch (rows) {
        case 1: add_int8_products(1, x, size, weight, quads, sums); break;
        case 2: add_int8_products(2, x, size, weight, quads, sums); break;
        case 3: add_int8_products(3, x, size, weight, quads, sums); break;
        case 4: add_int8_products(4, x, size, weight, quads, sums); break;
        case 5: add_int8_products(5, x, size, weight, quads, sums); break;
        case 6: add_int8_products(6, x, size, weight, quads, sums); break;
        case 7: add_int8_products(7, x, size, weight, quads, sums); break;
        default: add_int8_products(ROWS, x, size, weight, quads, sums);
    }
}

enum { ZERO = 128 };  // what stands for 0 among unsigned bytes

// Rounds each row of x[num_rows][size] to bytes: value = (byte - ZERO) * scales[row]. The largest becomes ZERO +- 127.
TARGET void specgw_quantize(const bf16 *x, uint8_t *bytes, float *scales, int64_t num_rows, int64_t size) {
    for (int64_t row = 0; row < num_rows; row++, x += size, bytes += size) {
        __m512 largest = _mm512_setzero_ps(), infinity = _mm512_set1_ps(__builtin_inff());
        __mmask16 broken = 0;  // infinite or not a number
        for (int64_t i = 0; i < size; i += LANES) {
            __m512 value = _mm512_abs_ps(load(x + i, lanes(size - i)));
            largest = _mm512_max_ps(largest, value);
            broken |= _mm512_cmp_ps_mask(value, infinity, _CMP_NLT_UQ);
        }
        scales[row] = broken ? __builtin_nanf("") : _mm512_reduce_max_ps(largest) / 127;
        __m512 inverse = _mm512_set1_ps(scales[row] > 0 ? 1 / scales[row] : 0);
        for (int64_t i = 0; i < size; i += LANES) {
            __mmask16 mask = lanes(size - i);
            __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i, mask), inverse));
            _mm512_mask_cvtepi32_storeu_epi8(bytes + i, mask, _mm512_add_epi32(rounded, _mm512_set1_epi32(ZERO)));
        }
    }
}

// As specgw_linear, but of bytes with their scales and of int8 weights, [ceil(num_columns / 64)][size / 4][64][4].
//
// Column c counts for weight * weight_scales[c]; `totals` are the sums of its weights: both [ceil(num_columns / 64)][64].
TARGET void specgw_int8_linear(const uint8_t *x, const float *scales, const int8_t *weight, const float *weight_scales,
                               const int32_t *totals, const bf16 *bias, const bf16 *residual, bf16 *output,
                               int64_t num_rows, int64_t num_columns, int64_t size) {
    int64_t num_blocks = num_rows ? (num_columns + BLOCK - 1) / BLOCK : 0;
    int64_t num_tiles = (num_rows + ROWS - 1) / ROWS, tile = num_tiles ? (num_rows + num_tiles - 1) / num_tiles : 1;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < num_blocks; block++)
        for (int64_t row = 0; row < num_rows; row += tile) {
            int32_t sums[ROWS * BLOCK];
            int rows = num_rows - row < tile ? num_rows - row : tile;
            add_int8_products_of(rows, x + row * size, size, weight + block * BLOCK * size, size / 4, sums);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = block * BLOCK, j = 0; j < BLOCK && c < num_columns; j += LANES, c += LANES) {
                    __mmask16 mask = lanes(num_columns - c);
                    __m512i zeros = _mm512_slli_epi32(_mm512_loadu_si512(totals + c), 7);  // * ZERO
                    __m512i exact = _mm512_sub_epi32(_mm512_loadu_si512(sums + r * BLOCK + j), zeros);
                    __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(weight_scales + c), _mm512_set1_ps(scales[row + r]));
                    __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), scale);
                    if (bias) sum = _mm512_add_ps(sum, load(bias + c, mask));
                    if (residual) sum = _mm512_add_ps(sum, load(residual + (row + r) * num_columns + c, mask));
                    store(output + (row + r) * num_columns + c, mask, sum);
                }
        }
}

// e to the power of x, to the precision of float32. Below -87 it is 0.
INLINE __m512 exponential(__m512 x) {
    __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693145752f), x);  // ln 2 in two parts
    rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(1.42860677e-6f), rest);
    __m512 sum = _mm512_set1_ps(1.0f / 720);  // the Taylor series: |rest| <= ln(2) / 2
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 120));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 24));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 6));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.5f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    __mmask16 vanishes = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_scalef_ps(sum, power), vanishes, _mm512_setzero_ps());
}

// output[size] = x / sqrt(mean(x^2) + eps) * weight; may be x itself.
INLINE void normalize(const bf16 *x, const bf16 *weight, bf16 *output, int64_t size, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        __m512 value = load(x + i, lanes(size - i));
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / size + eps);
    __m512 scale = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(mean));
    for (int64_t i = 0; i < size; i += LANES) {
        __mmask16 mask = lanes(size - i);
        store(output + i, mask, _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), scale), load(weight + i, mask)));
    }
}

// The rows of x[num_rows][size], which follow one another, normalized.
TARGET void specgw_rms_norm(const bf16 *x, const bf16 *weight, bf16 *output, int64_t num_rows, int64_t size,
                            float eps) {
#pragma omp parallel for schedule(static) if (num_rows > ROWS)
    for (int64_t row = 0; row < num_rows; row++) normalize(x + row * size, weight, output + row * size, size, eps);
}

// output[num_rows][size] = silu(gate) * up, where each row of gate_up[num_rows][2][size] is a gate, then an up.
TARGET static void silu_mul(const bf16 *gate_up, bf16 *output, int64_t num_rows, int64_t size) {
    __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for collapse(2) schedule(static) if (num_rows * size > SPAN)
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t start = 0; start < size; start += SPAN) {
            const bf16 *gates = gate_up + 2 * row * size, *ups = gates + size;
            for (int64_t i = start; i < size && i < start + SPAN; i += LANES) {
                __mmask16 mask = lanes(size - i);
                __m512 gate = load(gates + i, mask);
                __m512 decay = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
                __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, decay));
                store(output + row * size + i, mask, _mm512_mul_ps(silu, load(ups + i, mask)));
            }
        }
}

// Rotates the first `num_heads` heads of each row of x[num_rows][..][head_dim] in place; rows are `stride` apart.
//
// table[position][2][head_dim] holds cosines and sines, those of the first half negated: the halves of a head turn
// against each other. head_dim is a multiple of 32.
TARGET static void rotate(bf16 *x, const bf16 *table, const int64_t *positions, int64_t num_rows, int64_t num_heads,
                          int64_t head_dim, int64_t stride) {
    int64_t half = head_dim / 2;
#pragma omp parallel for schedule(static) if (num_rows > ROWS)
    for (int64_t row = 0; row < num_rows; row++) {
        const bf16 *cosines = table + 2 * positions[row] * head_dim, *sines = cosines + head_dim;
        for (int64_t head = 0; head < num_heads; head++)
            for (int64_t i = 0; i < half; i += LANES) {
                bf16 *first = x + row * stride + head * head_dim + i, *second = first + half;
                __m512 a = load(first, 0xffff), b = load(second, 0xffff);
                __m512 turned = _mm512_mul_ps(b, load(sines + i, 0xffff));
                store(first, 0xffff, _mm512_fmadd_ps(a, load(cosines + i, 0xffff), turned));
                turned = _mm512_mul_ps(a, load(sines + half + i, 0xffff));
                store(second, 0xffff, _mm512_fmadd_ps(b, load(cosines + half + i, 0xffff), turned));
            }
    }
}

enum {
    KEYS = 64,  // seen between two corrections of the softmax
    FEW = 4,    // keys whose products with the heads are summed together
    NEXT = 8,   // keys that are prefetched
    HEADS = 6,  // query heads that are computed together: FEW * 6 sums, FEW keys and a query fit the 32 registers
    MAX_HEAD_DIM = 256,
    BLOCK_SIZE = 16,  // cache rows in a block, as in kv_cache.py
};

// The sums of each of four registers.
INLINE __m128 sums_of_four(const __m512 *sum) {
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(sum[0], sum[1]), _mm512_unpackhi_ps(sum[0], sum[1]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(sum[2], sum[3]), _mm512_unpackhi_ps(sum[2], sum[3]));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// scores[head][KEYS] of FEW keys: scale * the products of each head's query, [heads][size], and each key.
INLINE void score(int heads, const bf16 *query, const bf16 *const *keys, int64_t size, float scale, float *scores) {
    __m512 sum[HEADS][FEW];
    for (int h = 0; h < heads; h++)
        for (int k = 0; k < FEW; k++) sum[h][k] = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 32) {
        __m512bh key[FEW];
        for (int k = 0; k < FEW; k++) key[k] = (__m512bh)_mm512_loadu_si512(keys[k] + i);
        for (int h = 0; h < heads; h++) {
            __m512bh part = (__m512bh)_mm512_loadu_si512(query + h * size + i);
            for (int k = 0; k < FEW; k++) sum[h][k] = _mm512_dpbf16_ps(sum[h][k], part, key[k]);
        }
    }
    for (int h = 0; h < heads; h++)
        _mm_storeu_ps(scores + h * KEYS, _mm_mul_ps(sums_of_four(sum[h]), _mm_set1_ps(scale)));
}

// sums[head][2][LANES] of 32 elements = sums * corrections + weights[head][key] * value of the key. The first LANES
// are the even elements.
INLINE void add_values(int heads, const float *corrections, const float *weights, const bf16 *const *values,
                       int64_t num_keys, int64_t i, float *sums) {
    __m512 even[HEADS], odd[HEADS];
    for (int h = 0; h < heads; h++) {
        __m512 correction = _mm512_set1_ps(corrections[h]);
        even[h] = _mm512_mul_ps(_mm512_loadu_ps(sums + h * MAX_HEAD_DIM + i), correction);
        odd[h] = _mm512_mul_ps(_mm512_loadu_ps(sums + h * MAX_HEAD_DIM + i + LANES), correction);
    }
    for (int64_t key = 0; key < num_keys; key++) {
        __m512i both = _mm512_loadu_si512(values[key] + i);
        __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        __m512 second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
        for (int h = 0; h < heads; h++) {
            __m512 weight = _mm512_set1_ps(weights[h * KEYS + key]);
            even[h] = _mm512_fmadd_ps(weight, first, even[h]);
            odd[h] = _mm512_fmadd_ps(weight, second, odd[h]);
        }
    }
    for (int h = 0; h < heads; h++) {
        _mm512_storeu_ps(sums + h * MAX_HEAD_DIM + i, even[h]);
        _mm512_storeu_ps(sums + h * MAX_HEAD_DIM + i + LANES, odd[h]);
    }
}

// Turns scores[KEYS] into weights relative to the largest score so far; returns what earlier sums are to be
// multiplied with. Scores past `num_keys` become 0.
INLINE float soften(float *scores, int64_t num_keys, float *largest, float *total) {
    __m512 top = _mm512_set1_ps(*largest);
    for (int64_t i = 0; i < num_keys; i += LANES)
        top = _mm512_mask_max_ps(top, lanes(num_keys - i), top, _mm512_loadu_ps(scores + i));
    float before = *largest;
    __m512 sum = _mm512_setzero_ps();
    *largest = _mm512_reduce_max_ps(top);
    for (int64_t i = 0; i < num_keys; i += LANES) {
        __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(*largest)));
        weight = _mm512_maskz_mov_ps(lanes(num_keys - i), weight);
        sum = _mm512_add_ps(sum, weight);
        _mm512_storeu_ps(scores + i, weight);
    }
    float correction = _mm512_cvtss_f32(exponential(_mm512_set1_ps(before - *largest)));
    *total = *total * correction + _mm512_reduce_add_ps(sum);
    return correction;
}

INLINE void prefetch(const bf16 *from, int64_t size) {
    for (int64_t i = 0; i < size; i += 32) _mm_prefetch((const char *)(from + i), _MM_HINT_T0);
}

// Where the cache rows of one key head are: those of slot 0, and how they follow one another.
typedef struct {
    const bf16 *keys;
    int64_t to_values, slot_size, head_dim;
} Head;

// Places of even elements' values and odd ones', which follow them, in the order of the elements.
static const uint16_t INTERLEAVED[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// The attention of some of one row's query heads that share a key head to rows `first` to `last` of a sequence.
INLINE void attend(int heads, const bf16 *query, bf16 *output, Head head, const int64_t *blocks, int64_t first,
                   int64_t last, float scale) {
    float sums[HEADS * MAX_HEAD_DIM], scores[HEADS * KEYS], largest[HEADS], total[HEADS], corrections[HEADS];
    const bf16 *keys[KEYS + FEW - 1], *values[KEYS];
    int64_t size = head.head_dim;
    for (int h = 0; h < heads; h++) {
        memset(sums + h * MAX_HEAD_DIM, 0, size * sizeof *sums);
        largest[h] = -__builtin_inff();
        total[h] = 0;
    }
    for (; first < last; first += KEYS) {
        int64_t num_keys = last - first < KEYS ? last - first : KEYS;
        for (int64_t i = 0; i < num_keys; i++) {
            int64_t row = first + i, slot = blocks[row / BLOCK_SIZE] * BLOCK_SIZE + row % BLOCK_SIZE;
            keys[i] = head.keys + slot * head.slot_size;
            values[i] = keys[i] + head.to_values;
        }
        for (int64_t i = num_keys; i % FEW; i++) keys[i] = keys[i - 1];  // their scores are not looked at
        for (int64_t i = 0; i < num_keys; i += FEW) {
            for (int64_t k = i; k < i + FEW && k < num_keys; k++) {
                if (k + NEXT < num_keys) prefetch(keys[k + NEXT], size);
                prefetch(values[k], size);
            }
            score(heads, query, keys + i, size, scale, scores + i);
        }
        for (int h = 0; h < heads; h++) corrections[h] = soften(scores + h * KEYS, num_keys, &largest[h], &total[h]);
        for (int64_t i = 0; i < size; i += 32) add_values(heads, corrections, scores, values, num_keys, i, sums);
    }
    for (int h = 0; h < heads; h++)
        for (int64_t i = 0; i < size; i += 32) {
            __m512 divisor = _mm512_set1_ps(total[h]), even = _mm512_loadu_ps(sums + h * MAX_HEAD_DIM + i);
            __m512 odd = _mm512_loadu_ps(sums + h * MAX_HEAD_DIM + i + LANES);
            __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_div_ps(odd, divisor), _mm512_div_ps(even, divisor));
            __m512i order = _mm512_loadu_si512(INTERLEAVED);
            _mm512_storeu_si512(output + h * size + i, _mm512_permutexvar_epi16(order, (__m512i)pairs));
        }
}

// The compiler keeps the sums in registers only if it knows the number of heads.
TARGET static void attend_with(int heads, const bf16 *query, bf16 *output, Head head, const int64_t *blocks,
                               int64_t first, int64_t last, float scale) {
    switch (heads) {
        case 1: attend(1, query, output, head, blocks, first, last, scale); break;
        case 2: attend(2, query, output, head, blocks, first, last, scale); break;
        case 3: attend(3, query, output, head, blocks, first, last, scale); break;
        case 4: attend(4, query, output, head, blocks, first, last, scale); break;
        case 5: attend(5, query, output, head, blocks, first, last, scale); break;
        default: attend(HEADS, query, output, head, blocks, first, last, scale);
    }
}

// Attention of single rows over the block cache. A row's result depends on the row and what it sees alone, not on the
// rows beside it.
//
// Args:
//     query: [num_rows][kv_heads * group][head_dim], rows `stride` apart; head_dim a multiple of 32.
//     pool: [slots][2 * kv_heads][head_dim]: keys, then values.
//     blocks: The block tables of all sequences, one after the other.
//     tables: For each row, where its sequence's block table begins.
//     positions: For each row, its place in its sequence: it sees the rows up to itself, at most `window` of them if
//         that is not 0.
//     output: [num_rows][kv_heads * group * head_dim].
TARGET void specgw_attend(const bf16 *query, const bf16 *pool, const int64_t *blocks, const int64_t *tables,
                          const int64_t *positions, bf16 *output, int64_t num_rows, int64_t kv_heads, int64_t group,
                          int64_t head_dim, int64_t stride, int64_t window, float scale) {
    int64_t size = group * head_dim, slot_size = 2 * kv_heads * head_dim;
    int64_t num_tiles = (group + HEADS - 1) / HEADS, tile = (group + num_tiles - 1) / num_tiles;
#pragma omp parallel for schedule(dynamic)
    for (int64_t item = 0; item < num_rows * kv_heads; item++) {
        int64_t i = item / kv_heads, at = item % kv_heads, last = positions[i] + 1;
        int64_t first = window && last > window ? last - window : 0;
        Head head = {pool + at * head_dim, kv_heads * head_dim, slot_size, head_dim};
        const bf16 *queries = query + i * stride + at * size;
        bf16 *to = output + (i * kv_heads + at) * size;
        for (int64_t g = 0; g < group; g += tile)
            attend_with(group - g < tile ? group - g : tile, queries + g * head_dim, to + g * head_dim, head,
                        blocks + tables[i], first, last, scale);
    }
}

// The weights of a product, as specgw_linear takes them, or specgw_int8_linear if there are scales.
typedef struct {
    const void *weight;
    const bf16 *bias;
    const float *scales;
    const int32_t *totals;
    int64_t num_columns, size;
} Product;

// A decoder layer. `head_norms` is [heads + kv_heads][head_dim], or null; `window` as specgw_attend takes it.
typedef struct {
    const bf16 *attention_norm, *head_norms, *mlp_norm;
    Product qkv, output, gate_up, down;
    int64_t window;
} Layer;

// What all layers have in common. `rotations` is the table of rotate().
typedef struct {
    const bf16 *rotations;
    int64_t heads, kv_heads, head_dim, hidden, inner;
    float eps, scale;
} Shape;

// Rows of sequences: what specgw_attend takes, and the cache rows of these rows.
typedef struct {
    const int64_t *blocks, *tables, *positions, *slots;
    int64_t num_rows;
} Rows;

// Room for what a layer computes on its way, a row for each row. `bytes` is as wide as the widest input.
typedef struct {
    bf16 *normed, *qkv, *attended, *gate_up, *activated;
    uint8_t *bytes;
    float *scales;
} Scratch;

TARGET static void multiply(const Product *by, const bf16 *x, const bf16 *residual, bf16 *output, int64_t num_rows,
                            const Scratch *scratch) {
    if (!by->scales) {
        specgw_linear(x, by->weight, by->bias, residual, output, num_rows, by->num_columns, by->size);
        return;
    }
    specgw_quantize(x, scratch->bytes, scratch->scales, num_rows, by->size);
    specgw_int8_linear(scratch->bytes, scratch->scales, by->weight, by->scales, by->totals, by->bias, residual, output,
                       num_rows, by->num_columns, by->size);
}

TARGET static void normalize_heads(bf16 *qkv, const bf16 *weights, const Shape *shape, int64_t num_rows,
                                   int64_t stride) {
    int64_t heads = shape->heads + shape->kv_heads, size = shape->head_dim;
#pragma omp parallel for schedule(static) if (num_rows > ROWS)
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            bf16 *at = qkv + row * stride + head * size;
            normalize(at, weights + head * size, at, size, shape->eps);
        }
}

// Attention, then the gated MLP, each added to hidden[num_rows][hidden].
TARGET static void run_layer(const Layer *layer, const Shape *shape, const Rows *rows, bf16 *pool, bf16 *hidden,
                             const Scratch *scratch) {
    int64_t num_rows = rows->num_rows, queries = shape->heads * shape->head_dim;
    int64_t keys_values = 2 * shape->kv_heads * shape->head_dim, stride = queries + keys_values;
    specgw_rms_norm(hidden, layer->attention_norm, scratch->normed, num_rows, shape->hidden, shape->eps);
    multiply(&layer->qkv, scratch->normed, NULL, scratch->qkv, num_rows, scratch);
    if (layer->head_norms) normalize_heads(scratch->qkv, layer->head_norms, shape, num_rows, stride);
    rotate(scratch->qkv, shape->rotations, rows->positions, num_rows, shape->heads + shape->kv_heads, shape->head_dim,
           stride);
    for (int64_t row = 0; row < num_rows; row++)
        memcpy(pool + rows->slots[row] * keys_values, scratch->qkv + row * stride + queries,
               keys_values * sizeof(bf16));
    specgw_attend(scratch->qkv, pool, rows->blocks, rows->tables, rows->positions, scratch->attended, num_rows,
                  shape->kv_heads, shape->heads / shape->kv_heads, shape->head_dim, stride, layer->window,
                  shape->scale);
    multiply(&layer->output, scratch->attended, hidden, hidden, num_rows, scratch);
    specgw_rms_norm(hidden, layer->mlp_norm, scratch->normed, num_rows, shape->hidden, shape->eps);
    multiply(&layer->gate_up, scratch->normed, NULL, scratch->gate_up, num_rows, scratch);
    silu_mul(scratch->gate_up, scratch->activated, num_rows, shape->inner);
    multiply(&layer->down, scratch->activated, hidden, hidden, num_rows, scratch);
}

// All layers, one after the other; hidden[num_rows][hidden] goes in and comes out, `pools` has each layer's cache rows.
TARGET void specgw_run_layers(const Layer *layers, bf16 *const *pools, int64_t num_layers, const Shape *shape,
                              const Rows *rows, bf16 *hidden, const Scratch *scratch) {
    for (int64_t i = 0; i < num_layers; i++) run_layer(&layers[i], shape, rows, pools[i], hidden, scratch);
}

#else

int specgw_is_supported(void) { return 0; }

#endif
