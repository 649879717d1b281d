"""The verifier's gRPC edge: requests go to the engine thread's inbox, outputs come back as streams.

Handlers move messages and compute nothing; only the engine thread touches the model.
"""

import asyncio
import itertools
import logging
import random
import threading
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import torch

from specgw import wire
from specgw.budget import draft_slots
from specgw.config import EngineArgs
from specgw.engine.model_runner import ModelRunner
from specgw.errors import NotReady, SpecgwError
from specgw.grammar import GrammarCompiler, compiler_for
from specgw.grammar_worker import GrammarWorker
from specgw.handshake import build_hello
from specgw.link import ProposerLink
from specgw.lookup.prediction import Prediction
from specgw.telemetry import name_thread, tell_simulation, tell_synthetic
from specgw.types import SpeculationStats, VerifierInfo
from specgw.v1 import verifier_pb2, verifier_pb2_grpc
from specgw.wire_many import Answer
from verifier_svc.acceptance import build_acceptance
from verifier_svc.client_stream import ClientStream, Sink
from verifier_svc.custom_processors import load_processors
from verifier_svc.draft_length import build_draft_length
from verifier_svc.drafting import Drafting
from verifier_svc.local_drafts import build_local_drafts
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.scheduler import Scheduler, SchedulerLimits, Snapshot
from verifier_svc.session import check_request
from verifier_svc.verifier import Verifier

logger = logging.getLogger(__name__)

SERVICE_NAME = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name

_Answers = asyncio.Queue[Answer]


class VerifierService(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers requests with one scheduler in one engine thread. Built on the event loop."""

    def __init__(
        self,
        runner: ModelRunner,
        links: Sequence[ProposerLink],
        args: EngineArgs,
        metrics: VerifierMetrics | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        settings = args.specgw.verifier
        metrics = metrics or VerifierMetrics()
        self.verifier_id = uuid.uuid4().hex
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._runner = runner
        self._links = links
        self._args = args
        self._seeds = random.Random(args.seed)
        self._session_ids = itertools.count(1)
        self._grammars = GrammarWorker(
            grammars
            or compiler_for(
                args.tokenizer_path,
                runner.vocab_size,
                runner.eos_token_ids,
                args.structured_outputs_config,
            )
        )
        self._sinks: dict[int, Sink] = {}
        self._streams: set[ClientStream] = set()
        self._is_draining = False
        acceptance = build_acceptance(args.speculative_config)
        drafting = Drafting(
            links,
            runner.vocab_size,
            settings.draft_timeout_s,
            settings.wait_for_slow_drafts,
            on_answer=metrics.observe_answer,
            length=build_draft_length(args),
            local=build_local_drafts(args, runner.max_model_len),
            uses_draft_probs=acceptance.uses_draft_probs,
            target_device=runner.description.device,
        )
        self._proposers = drafting.addresses
        self._scheduler = Scheduler(
            Verifier(
                runner,
                load_processors(settings.logits_processors, runner.vocab_size),
                acceptance,
            ),
            drafting,
            SchedulerLimits(
                args.max_num_seqs,
                args.max_num_batched_tokens,
                settings.max_waiting_requests,
                args.max_draft_tokens,
                settings.max_prefill_tokens_beside_decodes,
            ),
            self._deliver,
            metrics.observe_step,
        )
        if runner.description.is_simulated:
            tell_simulation(metrics.registry, "verifier")
        if args.is_synthetic:
            tell_synthetic(metrics.registry, "verifier")
        metrics.watch(lambda: self.snapshot, runner.kv_cache.capacity_tokens)
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not started."""
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    def start(self) -> None:
        """Starts the engine thread and begins to connect to the proposers."""
        self._thread.start()
        if self._args.max_draft_tokens:
            hello = build_hello(
                self.verifier_id, self._runner.description, self._args, self._runner.hidden
            )
            for link in self._links:
                link.start(hello, self._scheduler.inbox)

    @property
    def stream_count(self) -> int:
        """`GenerateMany` streams that are open."""
        return len(self._streams)

    @property
    def snapshot(self) -> Snapshot:
        """The scheduler's state after its last step."""
        return self._scheduler.snapshot

    def drain(self) -> None:
        """Lets `GenerateMany` streams end with their open calls; gRPC itself sees to `Generate`."""
        self._is_draining = True
        for stream in self._streams:
            stream.drain()

    async def stop(self) -> None:
        """Ends the links and the engine thread. Calls still open end with UNAVAILABLE."""
        for link in self._links:
            link.stop()
        await asyncio.gather(*(link.wait_stopped() for link in self._links))
        self._scheduler.inbox.stop()
        await asyncio.to_thread(self._thread.join)
        self._fail_all(NotReady("the verifier has stopped"))
        self._grammars.stop()

    async def Generate(
        self,
        request: verifier_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verifier_pb2.GenerateResponse]:
        answers, stats = _Answers(), SpeculationStats()
        session_id = await self.open_session(request, answers.put_nowait)
        try:
            while True:
                output = await answers.get()
                if isinstance(output, SpecgwError):
                    raise output
                stats.count(output.round)
                yield wire.generate_output_to_pb(output, stats)
                if output.finish_reason is not None:
                    return
        finally:
            self.close_session(session_id)

    # Writes instead of yielding: a generator could not end its own wait for a client to read.
    async def GenerateMany(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[verifier_pb2.GenerateManyRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        limits = self._args.max_num_seqs, self._args.specgw.verifier.max_waiting_requests
        stream = ClientStream(self, sum(limits), is_draining=self._is_draining)
        self._streams.add(stream)
        try:
            await stream.serve(request_iterator, context.write)
        finally:
            self._streams.discard(stream)

    async def open_session(self, request: verifier_pb2.GenerateRequest, sink: Sink) -> int:
        """Submits a request; returns the session's id.

        Raises:
            SpecgwError: if it can never be served, naming the field.
        """
        generate_request = wire.generate_request_from_pb(request)
        check_request(
            generate_request,
            self._runner.max_model_len,
            self._runner.vocab_size,
            self._proposers,
            self._args.max_logprobs,
        )
        seed = generate_request.sampling_params.seed
        if seed is None:
            seed = self._seeds.getrandbits(63)
        grammar = await self._grammars.start(generate_request)
        prediction = None
        if generate_request.prediction:
            prediction = await asyncio.to_thread(Prediction.of, generate_request)
        session_id = next(self._session_ids)
        self._sinks[session_id] = sink
        self._scheduler.inbox.submit(session_id, generate_request, seed, grammar, prediction)
        return session_id

    def close_session(self, session_id: int) -> None:
        """Frees a session before the next step, if it has not ended."""
        del self._sinks[session_id]
        self._scheduler.inbox.cancel(session_id)

    async def GetVerifierInfo(
        self,
        request: verifier_pb2.GetVerifierInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> verifier_pb2.GetVerifierInfoResponse:
        snapshot = self.snapshot
        response = wire.verifier_info_to_pb(self._describe(snapshot))
        response.eos_token_ids.extend(self._runner.eos_token_ids)
        response.kv_used_tokens = snapshot.kv_used_tokens
        response.running_count = snapshot.running_count
        response.waiting_count = snapshot.waiting_count
        response.speculation.CopyFrom(wire.speculation_stats_to_pb(snapshot.speculation))
        response.step_count = snapshot.step_count
        response.output_token_count = snapshot.output_token_count
        return response

    def _describe(self, snapshot: Snapshot) -> VerifierInfo:
        args = self._args
        return VerifierInfo(
            verifier_id=self.verifier_id,
            target_model=self._runner.description,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_capacity_tokens=self._runner.kv_cache.capacity_tokens,
            max_draft_tokens=args.max_draft_tokens,
            kv_lookahead_per_session=draft_slots(args.speculative_config).kv_lookahead,
            proposers=snapshot.proposers,
            generates_many=True,
        )

    def _run_engine(self) -> None:
        name_thread("engine")
        torch.get_num_threads()  # without this call, OpenMP ignores torch's setting in this thread
        try:
            self._scheduler.run()
        except BaseException as error:
            logger.exception("engine thread failed")
            self._loop.call_soon_threadsafe(self._engine_failed, error)

    def _engine_failed(self, error: BaseException) -> None:
        self._fail_all(NotReady("the verifier's engine has failed"))
        if not self.failed.done():
            self.failed.set_result(error)

    def _fail_all(self, error: SpecgwError) -> None:
        self._dispatch([(session_id, error) for session_id in self._sinks])

    def _deliver(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """Called by the engine thread once a step."""
        self._loop.call_soon_threadsafe(self._dispatch, answers)

    def _dispatch(self, answers: Sequence[tuple[int, Answer]]) -> None:
        for session_id, answer in answers:
            if sink := self._sinks.get(session_id):
                sink(answer)
        for stream in self._streams:
            stream.flush()
