"""TRL's real GRPOTrainer trains a tiny model on this CPU; das is fed by `attach` and knows what was sampled."""

import random
from collections import Counter

import pytest

from das import AcceptanceCounters, PriceBudget, RolloutHistory, prompt_key
from das.analysis import read_log
from das.analysis.replay import replay
from das_trainers import Feed, RolloutLog
from das_trainers import trl as das_trl

NUM_PROMPTS, NUM_SAMPLES, NUM_EPOCHS = 8, 8, 4


def batched(items, size):
    return [items[start : start + size] for start in range(0, len(items), size)]


@pytest.fixture(scope="module")
def run(model_folder, tokenizer, tmp_path_factory):
    """(history, directory of the log, what TRL's reward function saw: {(step, prompt, completion): times})."""
    trl = pytest.importorskip("trl", reason="the trainers' environment is not there: make test-trainers")
    from datasets import Dataset
    from task import Problem, decode, random_problem, reward

    folder = tmp_path_factory.mktemp("trl")
    source = random.Random(0)
    problems = [random_problem(source) for _ in range(NUM_PROMPTS)]
    rows = [{"prompt": p.prompt, "numbers": list(p.numbers), "target": p.target} for p in problems]
    seen = Counter()

    def earned(prompts, completions, completion_ids, numbers, target, trainer_state, **_):
        """The documented door: what TRL says it has sampled."""
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            seen[trainer_state.global_step, prompt, tuple(ids)] += 1
        return [
            reward(Problem(tuple(n), t), decode(ids)) for ids, n, t in zip(completion_ids, numbers, target, strict=True)
        ]

    arguments = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES // 2,  # two training steps an epoch
        num_generations=NUM_SAMPLES,
        num_train_epochs=NUM_EPOCHS,
        max_completion_length=64,
        learning_rate=2e-4,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        seed=0,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=str(model_folder),
        reward_funcs=earned,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    history, log = RolloutHistory(window_epochs=NUM_EPOCHS), RolloutLog(folder / "fed")
    feed = Feed(history, log)
    das_trl.attach(trainer, feed)
    trainer.train()
    assert feed.flush()
    assert not feed.statistics().fault
    return history, folder / "fed", seen


def test_the_history_holds_what_trl_sampled(run, tokenizer):
    history, _, seen = run
    fed = Counter()
    for prompt in {prompt for _, prompt, _ in seen}:
        ids = tokenizer(prompt)["input_ids"]
        for known in history.rollouts(prompt_key(ids)):
            assert known.prompt_token_ids.tolist() == ids
            fed[known.training_step, prompt, tuple(known.response_token_ids.tolist())] += 1
    assert fed == seen
    assert len(seen) > 50  # they are not all alike
    assert fed.total() == NUM_PROMPTS * NUM_SAMPLES * NUM_EPOCHS
    assert len({step for step, _, _ in seen}) == 2 * NUM_EPOCHS


def test_the_log_holds_the_same(run):
    history, folder, seen = run
    records = [record.rollout for record in read_log(folder)]
    assert len(records) == seen.total()
    again = RolloutHistory(window_epochs=NUM_EPOCHS)
    assert again.add_many(records) == len(records)
    assert sorted(again.prompt_keys()) == sorted(history.prompt_keys())


def test_drafts_from_the_epochs_before_are_accepted(run):
    """Epoch by epoch through the product's replay: what the engine would have saved in this very run."""
    _, folder, _ = run
    result = replay([record.rollout for record in read_log(folder)], policy=PriceBudget(min_survival=0.15))
    steps_of_epochs = batched(result.batches, len(result.batches) // NUM_EPOCHS)
    per_epoch = [
        sum((counters for step in steps for counters in step.requests), AcceptanceCounters()).tokens_per_decode_step
        for steps in steps_of_epochs
    ]
    print("tokens per decode step, by epoch:", [f"{value:.2f}" for value in per_epoch])
    assert len(per_epoch) == NUM_EPOCHS
    assert min(per_epoch[1:]) > 1.2 * per_epoch[0]


def test_a_trainer_that_generates_otherwise_goes_on_unfed(caplog):
    class Trainer:
        def _generate(self, prompts, images):
            return prompts

    trainer, feed = Trainer(), Feed()
    das_trl.attach(trainer, feed)
    assert "das knows (prompts)" in feed.fault
    assert trainer._generate([1], None) == [1]
