"""das beside the installed SGLang, without an engine: it fits, it is inert, it verifies as the reference does."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bench import tiny_llama
from das.verify import match_samples
from das_sglang import compatibility, doctor
from das_sglang.verify_arrays import verify_arrays

pytestmark = pytest.mark.sglang


def run(code, *arguments):
    """The last line that a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def test_the_installed_version_fits_and_doctor_says_so():
    assert compatibility.problems() == ()
    assert all(state == "ok" for _, state, _ in doctor.checks()), doctor.checks()


def test_loaded_but_not_selected_it_imports_no_worker_and_changes_nothing():
    code = """
import sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
names = sorted(name for name in sys.modules if name.startswith("das_sglang"))
ours = [hook for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks if "das_sglang" in hook.__module__]
print(names, ours, "sglang.srt.speculative.ngram_worker" in sys.modules)
"""
    shown = run(code)
    assert "das_sglang.plugin" in shown
    assert "das_sglang.worker" not in shown
    assert shown.endswith("[] False")


RESOLVE = """
import json, os, sys
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs

def outcome(model, name, settings, extra):
    os.environ["DAS_SGLANG"] = settings
    extra = {"device": "cpu", "skip_tokenizer_init": True} | extra
    arguments = ServerArgs(model_path=model, speculative_algorithm=name, **extra)
    try:
        arguments.resolve_once()
    except ValueError as error:
        return str(error)
    view = resolving_view(arguments)
    return [view.speculative_num_draft_tokens, view.max_running_requests, view.speculative_eagle_topk]

MOVED
if LOADS:
    from sglang.srt.plugins import load_plugins
    load_plugins()
print(json.dumps([outcome(*case) for case in json.loads(sys.argv[1])]))
"""
TREE = '{"shape": "tree", "widths": [0, 5]}'
MISFIT = "import das_sglang.compatibility as c\nc.SEAMS = (*c.SEAMS, c.Seam('srt.layers.sampler', 'Sampler.draw'))"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama.train(tmp_path_factory.mktemp("untrained"), num_steps=0)


def resolved(model, *cases, loads=True, moved=""):
    """What SGLang makes of the arguments of each case: (algorithm, DAS_SGLANG, further arguments)."""
    code = RESOLVE.replace("MOVED", moved).replace("LOADS", str(loads))
    return json.loads(run(code, json.dumps([[str(model), *case] for case in cases])))


FILLED_IN = [
    ("DAS", "", {}, [16, None, 1]),
    ("das", TREE, {}, [6, None, 4]),
    ("DAS", "", {"speculative_num_draft_tokens": 8, "max_running_requests": 300}, [8, 300, 1]),
]
REFUSED = [
    ("DAS", "", {"pp_size": 2}, "does not work with --pp-size above 1"),
    ("DAS", "", {"enable_watermark": True}, "--enable-watermark"),
    ("DAS", TREE, {"page_size": 16}, "--page-size above 1 with shape 'tree'"),
    ("DAS", "", {"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens 1, N is 1; it must be 2 to 65"),
]


def test_arguments_are_filled_in_or_refused_and_no_limit_of_requests_is_set(model):
    outcomes = resolved(model, *(case[:3] for case in FILLED_IN + REFUSED))
    assert outcomes[: len(FILLED_IN)] == [case[3] for case in FILLED_IN]
    for outcome, (*_, message) in zip(outcomes[len(FILLED_IN) :], REFUSED, strict=True):
        assert message in outcome


def test_keyed_noise_is_refused_with_samplers_that_take_no_seeds(model):
    """Of arguments that are not resolved yet: on a CPU, SGLang then puts pytorch in the place of any other sampler."""
    code = """
import json, sys
from das_sglang.algorithm import refuse_server_args
from das_sglang.settings import Settings
from sglang.srt.server_args import ServerArgs

def refusal(noise_seed, sampler):
    arguments = ServerArgs(model_path=sys.argv[1], speculative_algorithm="DAS", sampling_backend=sampler)
    try:
        refuse_server_args(arguments, Settings(noise_seed=noise_seed))
    except ValueError as error:
        return str(error)

cases = (1, None), (1, "pytorch"), (None, "flashinfer"), (1, "flashinfer")
print(json.dumps([refusal(*case) for case in cases]))
"""
    *allowed, refused = json.loads(run(code, str(model)))
    assert allowed == [None, None, None]
    assert "noise_seed with the sampling backend flashinfer, which takes no seeds; give --sampling-backend" in refused


def test_frameworks_that_skip_load_plugins_hear_of_an_unknown_algorithm_and_can_use_ngram(model):
    unknown, ngram = resolved(model, ("DAS", "", {}), ("NGRAM", "", {}), loads=False)
    assert "Unknown speculative algorithm name" in unknown
    assert ngram[0] == 12


def test_an_sglang_that_does_not_fit_says_so_when_das_is_selected_and_only_then(model):
    refused, ngram = resolved(model, ("DAS", "", {}), ("NGRAM", "", {}), moved=MISFIT)
    assert "--speculative-algorithm DAS: SGLang" in refused
    assert "srt.layers.sampler.Sampler.draw" in refused
    assert ngram[0] == 12


# ---------------------------------------------------------------- NGRAM that is das

REPLACE = """
import functools, json, logging, os, sys
from das_sglang import compatibility, plugin
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

TARGET = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
model, cases = json.loads(sys.argv[1])
warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("das").addHandler(handler)
fitting = compatibility.SEAMS

def outcome(settings, extra, fits):
    # What NGRAM's create_worker answers, with what this process would have hooked into it; and warnings.
    warnings.clear()
    os.environ["DAS_SGLANG"] = settings
    compatibility.problems.cache_clear()
    compatibility.SEAMS = fitting if fits else (*fitting, compatibility.Seam("srt.layers.sampler", "Sampler.draw"))
    plugin.register()
    create_worker = SpeculativeAlgorithm.create_worker
    for _, hook, _ in HookRegistry._hooks.pop(TARGET, ()):
        create_worker = functools.partial(hook, create_worker)
    extra = {"device": "cpu", "skip_tokenizer_init": True} | extra
    arguments = ServerArgs(model_path=model, speculative_algorithm="NGRAM", **extra)
    arguments.resolve_once()
    if "noise_seed" in settings:  # on a CPU, SGLang puts pytorch in the place of any other
        arguments._resolved_overrides.append(("a GPU's", {"sampling_backend": "flashinfer"}))
    try:
        told = create_worker(SpeculativeAlgorithm.NGRAM, arguments).__name__
    except ValueError as error:
        told = str(error)
    return told, list(warnings)

print(json.dumps([outcome(*case) for case in cases]))
"""
NGRAM_CASES = [
    ('{"replace_ngram": true}', {}, True, "DasWorker"),
    ('{"replace_ngram": true}', {"max_running_requests": 48}, True, "DasWorker"),
    ('{"replace_ngram": true, "shape": "tree"}', {}, True, "DasWorker"),
    ('{"policy": "best"}', {}, True, "NGRAMWorker"),  # not meant
    ("", {}, False, "NGRAMWorker"),
    ('{"replace_ngram": true, "policy": "best"}', {}, True, "NGRAM, with replace_ngram: DAS_SGLANG: policy is 'best'"),
    ("{", {}, True, "NGRAM, with replace_ngram: DAS_SGLANG: Expecting property name"),
    ('{"replace_ngram": true}', {}, False, "srt.layers.sampler.Sampler.draw"),
    ('{"replace_ngram": true}', {"enable_watermark": True}, True, "does not work with --enable-watermark"),
    ('{"replace_ngram": true, "noise_seed": 1}', {}, True, "flashinfer, which takes no seeds; give --sampling-backend"),
    (
        '{"replace_ngram": true, "shape": "tree"}',
        {"speculative_ngram_max_bfs_breadth": 1},
        True,
        "--speculative-ngram-max-bfs-breadth 1 sets attention backends up for chains",
    ),
    (
        '{"replace_ngram": true, "policy": "fixed:15"}',
        {},
        True,
        "with --speculative-num-draft-tokens 12, policy is 'fixed:15'; N must be an int, 0 <= N <= 11",
    ),
]


def test_ngram_is_das_or_an_error_where_das_is_meant(model):
    outcomes = json.loads(run(REPLACE, json.dumps([str(model), [case[:3] for case in NGRAM_CASES]])))
    for (told, _), (*case, expected) in zip(outcomes, NGRAM_CASES, strict=True):
        assert expected in told, case
        assert not told.endswith("Worker") or told == expected, case
    limits = [[text for text in warnings if "run 48 requests at once" in text] for _, warnings in outcomes[:2]]
    assert list(map(len, limits)) == [1, 0]  # said where SGLang has set it, not where the user has


# ---------------------------------------------------------------- width


@pytest.mark.parametrize(("widths", "num_warnings"), [((0, 3, 7), 1), ((7,), 0)])
def test_a_backend_with_one_verify_width_keeps_it_whatever_is_asked_later(monkeypatch, caplog, widths, num_warnings):
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    from das_sglang.drafting import Drafting
    from das_sglang.settings import Settings
    from das_sglang.worker import DasWorker

    monkeypatch.setattr(NGRAMWorker, "init_attention_backends", lambda worker: None)
    worker = DasWorker.__new__(DasWorker)
    worker.drafting = Drafting(Settings(widths=widths))
    worker.draft_token_num, worker.device, worker._warned = 8, "cuda", set()
    worker.model_runner = SimpleNamespace(attn_backend=SimpleNamespace(num_draft_tokens=8))
    with caplog.at_level("WARNING", "das"):
        worker.init_attention_backends()
    assert len(caplog.records) == num_warnings
    assert worker.drafting.settings.widths == (7,)
    with pytest.raises(ValueError, match="has one verify width"):
        worker.drafting.configure(widths=(0, 3, 7))


# ---------------------------------------------------------------- verification


def batch_of(torch, num_requests):
    info = SimpleNamespace(
        is_all_greedy=True,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
    )
    return SimpleNamespace(seq_lens=torch.full((num_requests,), 10), sampling_info=info)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_torch_follows_drafts_as_the_reference_does(monkeypatch, shape):
    import torch
    from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask_func
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.speculative.ngram_info import NgramVerifyInput
    from test_sglang_settings import drafts_of

    from das_sglang import verification

    monkeypatch.setattr(verification, "_for_each_node", lambda sampling, num_nodes: sampling)
    monkeypatch.setattr(verification, "_agreed", lambda samples: samples)
    random = np.random.default_rng(0)
    width, accepted = 8, 0
    num_nodes = 1 + width
    for _ in range(40):
        drafts = drafts_of(shape=shape, lengths=[0, 2, 5, 8])
        tokens, mask = verify_arrays(drafts, [1] * len(drafts), width=width)
        samples = random.integers(0, 3, (len(drafts), num_nodes))
        verify_input = NgramVerifyInput(
            draft_token=torch.from_numpy(tokens),
            custom_mask=torch.from_numpy(mask),
            positions=torch.empty(tokens.size, dtype=torch.int64),
            **{
                name: torch.empty((len(drafts), num_nodes), dtype=torch.int64)
                for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
            },
            draft_token_num=num_nodes,
        )
        reconstruct_indices_from_tree_mask_func(
            verify_input.custom_mask,
            torch.full((len(drafts),), 10),
            verify_input.positions,
            verify_input.retrieve_index,
            verify_input.retrieve_next_token,
            verify_input.retrieve_next_sibling,
            len(drafts),
            num_nodes,
        )
        emitted, lengths, places = verification.sample_then_match(
            verify_input,
            batch_of(torch, len(drafts)),
            LogitsProcessorOutput(next_token_logits=torch.zeros(tokens.size, 3)),
            sampler=lambda *_, samples=samples, **__: torch.from_numpy(samples.reshape(-1)),
        )
        for row, draft in enumerate(drafts):
            expected = match_samples(
                draft.draft_token_ids, samples[row, : 1 + len(draft)].tolist(), parents=draft.parents
            )
            assert emitted[places[row, : lengths[row]]].tolist() == expected
            assert (places[row, lengths[row] :] == -1).all()
            accepted += len(expected) - 1
    assert accepted > 20
