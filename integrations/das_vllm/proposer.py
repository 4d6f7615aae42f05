"""DasProposer: what vLLM calls after every engine step. Whatever happens in here, the engine goes on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import das
from das.rollout import check_vocabulary
from das_ray.rank_broadcast import broadcast_in
from das_ray.shared_history import SharedHistory
from das_vllm.engine_rows import EngineRows, runner_from_stack
from das_vllm.request_tracker import RequestTracker, StepOutcome, key_of_request
from das_vllm.seam import check_installed, installed_version
from das_vllm.settings import Settings, check_num_speculative_tokens, read_settings
from das_vllm.statistics import DraftingTimes, LastStep, statistics

logger = logging.getLogger("vllm.das_vllm")  # below vLLM's logger, whose handler shows it


class DasProposer:
    """Drafts for vLLM's V1 model runner: `speculative_config`'s method "custom_class".

    The first fault is logged with its traceback, and drafting is off from then on: an empty draft is always legal, so
    the engine goes on as without speculation.

    Args:
        vllm_config: vLLM's VllmConfig of this worker.

    Raises:
        TypeError, ValueError: a wrong setting, before the engine has started.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.settings: Settings = read_settings(getattr(vllm_config, "additional_config", None), os.environ)
        self.num_speculative_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        check_num_speculative_tokens(self.num_speculative_tokens)
        self.fault: str | None = None  # why drafting is off
        self.num_waiting = 0  # requests queued in the scheduler; set by the plugin before each step
        self._drafts_here = _drafts_on_this_rank(vllm_config.parallel_config)
        self._saves_here = _is_first_rank(vllm_config.parallel_config)
        self._vocabulary_size = _vocabulary_size(vllm_config)
        self._data_parallel_rank = int(getattr(vllm_config.parallel_config, "data_parallel_rank", 0))
        self._is_deterministic = self.settings.deterministic or _schedules_on_each_rank(vllm_config.parallel_config)
        scheduler = vllm_config.scheduler_config
        limit = getattr(scheduler, "max_num_scheduled_tokens", None) or scheduler.max_num_batched_tokens
        self._max_step_tokens = int(limit)  # of all requests, one of each included
        self._shares_among_ranks = _schedules_on_each_rank(vllm_config.parallel_config)
        self._engine: EngineRows | None = None
        self.times = DraftingTimes()
        self.last_step = LastStep()
        self._make_drafter()
        self.shared = self._make_shared() if self._drafts_here else None
        if self._drafts_here:
            mode = "deterministic" if self._is_deterministic else "timed"
            logger.info(
                "das %s drafts up to %d tokens a request and step (%s): %s",
                das.__version__,
                min(self.num_speculative_tokens, self.policy.max_draft_tokens),
                mode,
                self.settings,
            )
            self._check_seam()

    def _check_seam(self) -> None:
        """Say what of this vLLM does not fit, and draft nothing if that needs it. A second: it reads sources."""
        for hook in check_installed():
            if not hook.fits:
                misfit = f"{installed_version()} does not fit: {hook}"
                if hook.is_essential:
                    self.switch_off(misfit)
                else:
                    logger.warning("das: %s", misfit)

    def _make_drafter(self) -> None:
        settings = self.settings
        self.policy = settings.make_policy(self.num_speculative_tokens, can_learn_latency=not self._is_deterministic)
        self.history = settings.make_history()
        self.tracker = RequestTracker(das.Drafter(self.history), learn=settings.learn_from_engine)

    def _make_shared(self) -> SharedHistory | None:
        if self.settings.shared_history is None:
            return None
        return SharedHistory(
            self.settings.shared_history,
            drafter=self.tracker.drafter,
            policy=lambda: self.policy,
            broadcast=broadcast_in(_tensor_parallel_group) if self._shares_among_ranks else None,
            vocabulary_size=self._vocabulary_size,
            is_first_rank=self._saves_here,
        )

    @property
    def is_drafting(self) -> bool:
        """Whether this rank drafts: not where another rank's drafts are used, and not after a fault."""
        return self._drafts_here and self.fault is None

    # ---------------------------------------------------------------- called by vLLM

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no draft model to load; vLLM's CPU runner calls this all the same."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return the draft of each row of the engine's batch; never raises.

        vLLM calls the interface unstable: other arguments than those of `_propose` switch drafting off.
        """
        try:
            if self.shared is not None:
                self.shared.between_steps()
            if self.is_drafting:
                started_s = time.perf_counter()
                drafts = self._propose(started_s, *args, **kwargs)
                self.times.end_of_drafting(started_s, time.perf_counter())
                return drafts
        except Exception as error:
            self.switch_off(f"{type(error).__name__}: {error}", exception=error)
        rows = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, list)), [])
        return [[] for _ in rows]

    # ---------------------------------------------------------------- called by the plugin and by workers

    def bind(self, runner: Any, *, how: str) -> None:
        """Connect to the model runner whose drafter this is; never raises."""
        try:
            self._engine = EngineRows(runner, how=how)
            self._engine.lift_drafter_limit()
        except Exception as error:
            self.switch_off(f"the model runner does not fit: {error}", exception=error)

    def scheduled(self, new_requests: Iterable[Any]) -> None:
        """The step that comes prefills these requests: build their prompts' trees beside it; never raises.

        Args:
            new_requests: vLLM's NewRequestData.
        """
        if self.is_drafting:
            try:
                keys = [key_of_request(new.prompt_token_ids, new.sampling_params) for new in new_requests]
                self.prepare([key for key in keys if key is not None])
            except Exception as error:
                self.switch_off(f"{type(error).__name__}: {error}", exception=error)

    def weights_changed(self) -> None:
        """Open the next training step; never raises."""
        if self.is_drafting:
            try:
                self.new_training_step()
            except Exception as error:
                self.switch_off(f"{type(error).__name__}: {error}", exception=error)

    def switch_off(self, reason: str, *, exception: BaseException | None = None) -> None:
        """Draft no more, say why once, and give back the memory."""
        if self.fault is not None:
            return
        self.fault = reason
        logger.error(
            "das is off from here on; the engine goes on without drafts. Reason: %s. Please report this with the lines "
            "below at the das-drafter project.",
            reason,
            exc_info=exception,
        )
        if self.shared is not None:
            self.shared.close(wait_s=0.0)
            self.shared = self.shared if self._shares_among_ranks else None  # others may wait for its broadcasts
        self._make_drafter()

    def prepare(self, prompt_keys: Sequence[int]) -> None:
        """Requests of these prompts start soon: get what other engines know of them, and build their trees."""
        step = self.tracker.training_step or 0
        self.history.prepare([key for key in dict.fromkeys(prompt_keys) if not self.history.may_join(key, step)])
        if self.shared is not None:
            self.shared.announce(prompt_keys)

    def flush(self) -> int:
        """Finish requests that have left the engine since its last step, and return how many still run."""
        if self.is_drafting and self._engine is not None:
            self.tracker.drop_gone(self._engine.requests)
        return self.tracker.num_running()

    def new_training_step(self, training_step: int | None = None) -> int:
        """Let requests that start from now on belong to a new version of the policy, and return its step.

        Args:
            training_step: of the trainer, >= 0; None: the one after the newest that is known.

        Raises:
            TypeError, ValueError: no int, or out of range.
        """
        self.flush()
        begun = self.tracker.begin_step(training_step)
        if self.shared is not None:
            self.shared.share_learned()
        return begun

    def set_policy(self, settings: Settings) -> str:
        """Draft by these settings' policy from now on, and return its description."""
        self.policy = settings.make_policy(self.num_speculative_tokens, can_learn_latency=not self._is_deterministic)
        self.settings = settings
        logger.info("das drafts by %r from now on", self.policy)
        return repr(self.policy)

    def add_rollouts(self, rollouts: Sequence[das.Rollout]) -> int:
        """Take in rollouts that a trainer pushes; see `das_push_rollouts`. Nothing changes where it raises."""
        check_vocabulary(rollouts, vocabulary_size=self._vocabulary_size)
        num_new = self.history.add_many(rollouts)
        keys = dict.fromkeys(rollout.key for rollout in rollouts)
        self.history.prepare(keys)
        for key in keys:
            self.tracker.note_step(key)
        return num_new

    def save_state(self, path: str) -> dict[str, Any] | None:
        """Save what this rank has learned, if it is the one that saves; see `das_save_state`."""
        if not self._saves_here:
            return None
        if self.fault is not None:  # what was learned is gone: it would take the place of a state that holds something
            logger.warning("das: nothing was saved to %s, as drafting is off: %s", self._state_path(path), self.fault)
            return None
        self.flush()
        return asdict(das.save_state(self._state_path(path), drafter=self.tracker.drafter, policy=self.policy))

    def load_state(self, path: str) -> dict[str, Any]:
        """Take in a saved state; see `das_load_state`. Nothing changes where it raises."""
        saved = das.load_state(self._state_path(path), mapped=False)  # a mapped file that is cut short ends the process
        saved.check_vocabulary(self._vocabulary_size)
        is_same_policy = saved.policy_name == type(self.policy).__name__
        saved.restore(drafter=self.tracker.drafter, policy=self.policy if is_same_policy else None)
        for window in saved.windows:
            self.tracker.note_step(window.prompt_key)
        num_rollouts = sum([len(window.rollouts) for window in saved.windows])
        return {"num_rollouts": num_rollouts, "is_policy_restored": is_same_policy}

    def _state_path(self, path: str) -> str:
        return path.replace("{data_parallel_rank}", str(self._data_parallel_rank))

    def statistics(self) -> dict[str, float | int | str | bool]:
        """Return counters under Prometheus-style names; see `das_vllm.statistics`."""
        return statistics(self)

    # ---------------------------------------------------------------- inside

    def _propose(
        self,
        now_s: float,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """Take in a step, and return the draft of each row.

        Args:
            now_s: `time.perf_counter()` at the call.
            sampled_token_ids: of each row, accepted draft tokens and the one after them; empty in chunked prefill.
            num_tokens_no_spec: of each row, prompt and response, int32 array.
            token_ids_cpu: [rows, max_model_len], int32 array.
        """
        engine = self._engine or self._find_engine()
        engine.lift_drafter_limit()
        outcome = self.tracker.take_in(engine, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        step_ms = None if self._is_deterministic or not outcome.is_pure_decode else self.times.step_ms(now_s)
        planned = das.plan_step(
            self.tracker.drafter,
            outcome.request_ids,
            policy=self.policy,
            num_running=outcome.num_in_batch,
            num_waiting=self.num_waiting,
            max_draft_tokens=self._limits(outcome),
            max_batch_draft_tokens=max(0, self._max_step_tokens - outcome.num_in_batch),
            step_ms=step_ms,
        )
        self.tracker.note_drafts(planned)
        self.last_step = LastStep(outcome.num_in_batch, sum(map(len, planned.values())))
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, draft in zip(outcome.rows, planned.values(), strict=True):
            drafts[row] = draft.draft_token_ids
        return drafts

    def _limits(self, outcome: StepOutcome) -> dict[str, int]:
        """vLLM does not cut a draft that is too long: it stops the engine."""
        room, most = self.tracker.room, self.num_speculative_tokens
        return {request_id: min(most, room(request_id)) for request_id in outcome.request_ids}

    def _find_engine(self) -> EngineRows:
        runner = runner_from_stack()
        if runner is None:
            raise RuntimeError(
                "no model runner among the callers of propose(), and the general plugin has bound none: this vLLM does "
                "not fit; `das doctor` says what is missing"
            )
        self.bind(runner, how="call stack")
        if self._engine is None:
            raise RuntimeError(f"the model runner does not fit: {self.fault}")
        return self._engine


def _vocabulary_size(vllm_config: Any) -> int:
    """Tokens that the model has; no limit where this vLLM does not say."""
    ask = getattr(getattr(vllm_config, "model_config", None), "get_vocab_size", None)
    return 1 << 31 if ask is None else int(ask())


def _schedules_on_each_rank(parallel_config: Any) -> bool:
    """Whether each rank has a scheduler of its own, as under torchrun: then all must draft the same tokens."""
    return getattr(parallel_config, "distributed_executor_backend", None) == "external_launcher"


def _drafts_on_this_rank(parallel_config: Any) -> bool:
    """Whether the drafts of this rank are used: with one scheduler for all ranks, those of the first one are."""
    return _schedules_on_each_rank(parallel_config) or _is_first_rank(parallel_config)


def _is_first_rank(parallel_config: Any) -> bool:
    return int(getattr(parallel_config, "rank", 0)) % int(parallel_config.tensor_parallel_size) == 0


def _tensor_parallel_group() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group
