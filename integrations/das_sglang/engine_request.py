"""What das reads of SGLang's requests (`Req`), in one place: the attributes of another project may move."""

from __future__ import annotations

from typing import Any

from das.rollout import named_prompt_key

PROMPT_KEY_PARAMETER = "das_prompt_key"
RID_PREFIX = "das:"


def prompt_token_ids(request: Any) -> list[int]:
    """Return the prompt; placeholders of images and sounds are those of the tokenizer, not of the cache."""
    return list(request.origin_input_ids_unpadded)


def prompt_key(request: Any) -> int | None:
    """Return the key of the prompt that a request answers, or None: the hash of its tokens.

    The first that is there: `custom_params["das_prompt_key"]`, a string or an int; `extra_key`, without what SGLang
    appends for a LoRA adapter; a request id "das:KEY/anything".
    """
    parameters = request.sampling_params.custom_params
    if isinstance(parameters, dict) and parameters.get(PROMPT_KEY_PARAMETER) is not None:
        return named_prompt_key(parameters[PROMPT_KEY_PARAMETER])
    if request.extra_key:
        name = request.extra_key.removesuffix(request.lora_id or "")
        if name:
            return named_prompt_key(name)
    if request.rid.startswith(RID_PREFIX) and "/" in request.rid:
        return named_prompt_key(request.rid.removeprefix(RID_PREFIX).partition("/")[0])
    return None


def stop_token_ids(request: Any) -> frozenset[int]:
    """Return the tokens that end a request, as SGLang checks them."""
    if request.sampling_params.ignore_eos:
        return frozenset()
    stops = set(request.sampling_params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    tokenizer = request.tokenizer
    if tokenizer is not None:
        stops |= {tokenizer.eos_token_id} | set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
    return frozenset(stops - {None})


def unprocessed_tokens(request: Any, *, num_cached_tokens: int, last_emitted: list[int]) -> list[int]:
    """Return the tokens that a request has emitted and that SGLang has not yet put into its `output_ids`.

    With overlap scheduling results are processed a step late; but where another batch ran between two steps of a
    request (a prefill), its last step has been processed by then.

    Args:
        num_cached_tokens: of its prompt and response in the cache; the last token of the response never is.
        last_emitted: by its last pass.
    """
    num_response_tokens = num_cached_tokens + 1 - len(request.origin_input_ids)
    num_missing = num_response_tokens - len(request.output_ids)
    return last_emitted[-num_missing:] if num_missing > 0 else []


def max_new_tokens(request: Any) -> int:
    """Return the most tokens a request may emit; SGLang has cut it to what fits into the context."""
    return int(request.sampling_params.max_new_tokens)


def may_draft(request: Any, *, num_response_tokens: int) -> bool:
    """Return whether what comes after a draft token does not depend on the draft beyond what the model sees.

    SGLang applies one vector of penalties, and one state of a custom logit processor, to all positions of a draft.
    Behind its first token that is another distribution than decoding token by token has.
    """
    sampling = request.sampling_params
    return (
        sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
        and sampling.repetition_penalty == 1.0
        and num_response_tokens >= (sampling.min_new_tokens or 0)
        and request.custom_logit_processor is None
    )


def has_finished(request: Any) -> bool:
    """Return whether SGLang has ended a request."""
    return request.finished_reason is not None


def was_aborted(request: Any) -> bool:
    """Return whether a finished request ended because somebody gave it up."""
    return type(request.finished_reason).__name__ == "FINISH_ABORT"
