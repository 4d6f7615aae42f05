"""Configurations, and hooks of trainers that are not on the package index, by the fields of their records."""

import asyncio
import json
import re
import sys
import threading
import tomllib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from log_samples import write
from rollout_samples import KEY, PROMPT, stored
from test_log_formats import nemo_rl, prime_rl

from das import RolloutHistory, prompt_key
from das.analysis import read_log
from das_sglang.settings import Settings as SglangSettings
from das_trainers import Feed, openrlhf, slime, trl, verl
from das_trainers import nemo_rl as das_nemo_rl
from das_trainers import prime_rl as das_prime_rl
from das_trainers.configuration import vllm_speculative_config
from das_trainers.settings import VARIABLE, process_feed
from das_vllm.settings import MOST_DRAFT_TOKENS, read_settings

# ---------------------------------------------------------------- configurations


def test_every_vllm_is_told_the_same():
    speculative = {"method": "custom_class", "model": "das_vllm.DasProposer", "num_speculative_tokens": 8}
    assert vllm_speculative_config(8) == speculative
    (_, told) = trl.configuration(num_speculative_tokens=8).arguments
    assert json.loads(told) == speculative
    nemo = das_nemo_rl.configuration(num_speculative_tokens=8).settings
    assert nemo["policy"]["generation"]["vllm_kwargs"]["speculative_config"] == speculative
    prime = das_prime_rl.configuration(num_speculative_tokens=8).settings
    assert prime["inference"]["vllm"]["speculative_config"] == speculative
    overrides = dict(argument.split("=") for argument in verl.configuration(num_speculative_tokens=8).arguments)
    place = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    assert overrides == {f"{place}.{name}": str(value) for name, value in speculative.items()}


@pytest.mark.parametrize("made", [trl.configuration("colocate"), openrlhf.configuration()])
def test_what_is_injected_is_a_setting_of_das_in_vllm(made):
    assert read_settings(None, made.environment).inject_num_speculative_tokens == 16


@pytest.mark.parametrize("made", [slime.configuration(), verl.configuration("sglang")])
def test_what_sglang_is_told_are_settings_of_das_there(made):
    settings = SglangSettings.from_environment(made.environment)
    assert settings.replace_ngram == any("NGRAM" in argument for argument in made.arguments)


def test_ngram_replaced_by_das_drafts_as_das_does():
    """SGLang's own arguments for that name are 12 tokens and trees."""
    given = dict(argument.rpartition(".")[2].split("=") for argument in verl.configuration("sglang").arguments)
    settings = SglangSettings()
    assert settings.within(int(given["speculative_num_draft_tokens"])) == settings
    assert (settings.shape, given["speculative_ngram_max_bfs_breadth"]) == ("chain", "1")


def test_hooks_are_named_where_they_are():
    arguments = slime.configuration(with_rewards=True, with_keys=True).arguments
    paths = [argument for argument in arguments if argument.startswith("das_trainers.slime.")]
    assert [getattr(slime, path.rpartition(".")[2]) for path in paths] == [
        slime.sample_hook,
        slime.rollout_log,
        slime.generate,
    ]
    assert (
        verl.configuration(agent_loop_config_path="/a.yaml").arguments[-1].endswith(".agent_loop_config_path=/a.yaml")
    )
    assert openrlhf.configuration(agent_func_path="/a.py").arguments == ("--train.agent_func_path", "/a.py")


def test_the_page_for_users_says_the_same():
    page = (Path(__file__).parent.parent / "docs" / "trainers.md").read_text(encoding="utf-8")
    sglang = slime.configuration(with_rewards=True, with_keys=True).arguments
    lines = [*verl.configuration(agent_loop_config_path="/shared/das_agent_loops.yaml").arguments]
    lines += [" ".join(pair) for pair in zip(sglang[::2], sglang[1::2], strict=True)]
    lines += [f"--speculative-config '{trl.configuration().arguments[1]}'"]
    lines += [f"{name}='{value}'" for name, value in openrlhf.configuration().environment.items()]
    lines += [" ".join(openrlhf.configuration(agent_func_path="das_agent.py").arguments)]
    assert [line for line in lines if line not in page] == []
    (toml,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert tomllib.loads(toml) == das_prime_rl.configuration().settings
    (yaml,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    as_json = re.sub(r"([\w.]*[A-Za-z_][\w.]*)", r'"\1"', "{" + yaml.strip() + "}")
    assert json.loads(as_json) == das_nemo_rl.configuration().settings


@pytest.mark.parametrize("number", [0, MOST_DRAFT_TOKENS + 1, True, 1.5])
def test_a_wrong_number_of_tokens_is_refused(number):
    for configuration in (verl.configuration, trl.configuration, openrlhf.configuration, das_nemo_rl.configuration):
        with pytest.raises((TypeError, ValueError), match="num_speculative_tokens"):
            configuration(num_speculative_tokens=number)


def test_another_engine_or_mode_is_refused():
    with pytest.raises(ValueError, match="engine is 'trtllm'"):
        verl.configuration("trtllm")
    with pytest.raises(ValueError, match="vllm_mode is 'none'"):
        trl.configuration("none")


# ---------------------------------------------------------------- slime


class Status(Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"


@dataclass
class Sample:
    """The fields of slime.utils.types.Sample (0.3) that hooks read."""

    tokens: list
    response_length: int
    index: int = 0
    reward: object = None
    loss_mask: list | None = None
    weight_versions: list = field(default_factory=list)
    status: Status = Status.COMPLETED


@pytest.fixture
def fed(tmp_path, monkeypatch):
    """What the hooks of this process have fed so far."""
    monkeypatch.setenv(VARIABLE, json.dumps({"log": str(tmp_path / "fed")}))
    process_feed.cache_clear()

    def rollouts():
        assert process_feed().flush()
        history = RolloutHistory()
        history.add_many(record.rollout for record in read_log(tmp_path / "fed"))
        return [rollout for key in history.prompt_keys() for rollout in history.rollouts(key)]

    yield rollouts
    process_feed().close()
    process_feed.cache_clear()


def test_slime_samples_are_fed_with_the_engines_own_step(fed):
    sample = Sample([*PROMPT, 7, 8, 9], 3, index=5, loss_mask=[1, 0, 1], weight_versions=["12", "13"])
    assert slime.sample_hook(None, sample, rollout_id=40, evaluation=False) is None
    slime.sample_hook(None, Sample([*PROMPT, 7], 1, index=6), rollout_id=40)
    slime.sample_hook(None, Sample([*PROMPT, 7], 1, index=7), rollout_id=40, evaluation=True)
    slime.sample_hook(None, Sample([*PROMPT, 7], 1, index=8, status=Status.ABORTED), rollout_id=40)
    slime.sample_hook(None, Sample(PROMPT, 0, index=9), rollout_id=40)
    first, second = fed()
    assert (first.key, first.training_step, first.response_token_ids.tolist()) == (KEY, 12, [7, 8, 9])
    assert first.response_mask.tolist() == [True, False, True]
    assert (second.training_step, second.response_mask) == (40, None)


def test_rewards_come_later_and_make_no_second_copy(monkeypatch):
    history = RolloutHistory()
    feed = Feed(history)
    monkeypatch.setattr(slime, "process_feed", lambda: feed)
    samples = [Sample([*PROMPT, 7], 1, index=index) for index in range(3)]  # equal, and three
    for sample in samples:
        slime.sample_hook(None, sample, rollout_id=4)
    samples[0].reward, samples[1].reward = 1.0, {"score": 0.5, "other": 0.0}
    assert slime.rollout_log(4, SimpleNamespace(reward_key="score"), samples, {}, 1.0) is False
    assert feed.flush()
    assert [rollout.reward for rollout in history.rollouts(KEY)] == [1.0, 0.5, None]


def test_a_sample_of_another_make_does_not_take_slime_down(fed, caplog):
    assert slime.sample_hook(None, object()) is None
    assert slime.rollout_log(1, None, [object()], None, None) is False
    assert "the sample hook of slime: AttributeError" in process_feed().fault
    assert len(caplog.records) == 1


@pytest.mark.parametrize("named", [None, {"return_top_p_token_ids": True}])
def test_a_response_that_goes_on_names_the_prompt_that_it_began_with(named, fed, monkeypatch):
    """slime is not on the package index: in place of its module, one that keeps what `generate` is given."""
    asked = []

    async def generate(args, sample, sampling_params):
        asked.append(sampling_params)
        return sample

    package, module = ModuleType("slime.rollout"), ModuleType("slime.rollout.sglang_rollout")
    module.generate = generate
    package.sglang_rollout = module
    for name, value in {"slime": ModuleType("slime"), "slime.rollout": package}.items():
        monkeypatch.setitem(sys.modules, name, value)
    parameters = {"temperature": 1.0} | ({} if named is None else {"custom_params": named})
    begun, new = Sample([*PROMPT, 7, 8], 2), Sample([], 0)
    for sample in (begun, new):
        assert asyncio.run(slime.generate(None, sample, parameters)) is sample
    assert asked[0]["custom_params"] == {"das_prompt_key": prompt_key(PROMPT)} | (named or {})
    assert asked[1] == parameters


# ---------------------------------------------------------------- files of NeMo-RL and prime-rl


def test_nemo_rl_files_are_fed_once_when_they_have_stopped_growing(tmp_path):
    history = RolloutHistory()
    feed = Feed(history)
    follower = das_nemo_rl.follower(tmp_path / "exp_001", feed)
    assert follower.poll() == 0  # not there yet
    (tmp_path / "exp_001").mkdir()
    file = write(tmp_path / "exp_001" / "train_data_step3.jsonl", nemo_rl())
    assert follower.poll() == 0
    write(file, nemo_rl(), nemo_rl())
    assert [follower.poll() for _ in range(3)] == [0, 2, 0]
    write(tmp_path / "exp_001" / "train_data_step4.jsonl", nemo_rl(rewards=1.0))
    assert [follower.poll() for _ in range(3)] == [0, 1, 0]
    assert feed.flush()
    rollouts = history.rollouts(prompt_key([1, 2]))
    assert [(r.training_step, r.reward) for r in rollouts] == [(3, 0.5), (3, 0.5), (4, 1.0)]
    assert rollouts[0].response_mask.tolist() == [True, False, True, True]


def test_prime_rl_steps_are_fed_when_they_are_marked_stable(tmp_path):
    history = RolloutHistory()
    feed = Feed(history)
    follower = das_prime_rl.follower(tmp_path, feed)
    step = tmp_path / "token_exports" / "step_3"
    step.mkdir(parents=True)
    for rank in (0, 1):
        write(step / f"rank_{rank}.jsonl", prime_rl(rank=rank))
    assert [follower.poll(), follower.poll()] == [0, 0]
    (step / "STABLE").touch()
    assert [follower.poll(), follower.poll()] == [2, 0]
    assert feed.flush()
    assert stored(history, prompt_key([1, 2])) == [(3, [7, 8, 9])] * 2  # equal, from two ranks


def test_a_bad_row_is_left_out_and_told_of(tmp_path, caplog):
    feed = Feed(RolloutHistory())
    write(tmp_path / "train_data_step1.jsonl", nemo_rl(input_lengths=9), nemo_rl())
    write(tmp_path / "train_data_step2.jsonl", b"{")
    follower = das_nemo_rl.follower(tmp_path, feed)
    assert [follower.poll(), follower.poll()] == [0, 1]
    assert not feed.fault
    assert "input_lengths is 9" in caplog.text
    assert "train_data_step2.jsonl" in caplog.text


def test_files_written_just_before_the_end_are_fed(tmp_path):
    """No second look tells that the last file has stopped growing; that training has ended does."""
    history = RolloutHistory()
    feed = Feed(history)
    stop = threading.Event()
    thread = threading.Thread(target=das_nemo_rl.follower(tmp_path, feed).run, args=(stop,), kwargs={"every_s": 60})
    thread.start()
    write(tmp_path / "train_data_step3.jsonl", nemo_rl())
    stop.set()
    thread.join(60)
    assert feed.flush()
    assert [stored.training_step for stored in history.rollouts(prompt_key([1, 2]))] == [3]


def test_a_thread_follows_until_it_is_stopped(tmp_path):
    history = RolloutHistory()
    feed = Feed(history)
    stop = threading.Event()
    follower = das_prime_rl.follower(tmp_path, feed)
    thread = threading.Thread(target=follower.run, args=(stop,), kwargs={"every_s": 0.01})
    thread.start()
    step = tmp_path / "token_exports" / "step_3"
    step.mkdir(parents=True)
    write(step / "rank_0.jsonl", prime_rl())
    (step / "STABLE").touch()
    stop.set()
    thread.join(20)
    assert feed.flush()
    assert stored(history, prompt_key([1, 2])) == [(3, [7, 8, 9])]
