"""Kill processes that save a state, at random moments, and look at what they leave: python state_kills.py DIR NUMBER.

Each process loads the state, changes its history step by step, saves after each, and tells when a save has returned.
What is loaded after its end must be the history of that step, or of the one that was being saved.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from state_samples import advance, contents

from das import RolloutHistory, load_state, save_state
from das import state_directory as directory_module


def save_for_ever(path, acknowledgements):
    """The process that is going to be killed."""
    history = RolloutHistory(window_epochs=3)
    if (path / directory_module.HEAD_NAME).exists():
        load_state(path, history=history)
    number = steps_done(history)
    while True:
        advance(history, number)
        number += 1
        save_state(path, history=history)
        os.write(acknowledgements, number.to_bytes(4, "little"))


def steps_done(history):
    """How many steps of `advance` a history has seen, by the names of its rollouts."""
    names = [stored.request_id for key in history.prompt_keys() for stored in history.rollouts(key)]
    return max([int(name.split("-")[0]) + 1 for name in names if name], default=0)


def kill_after(path, wait_s, *, first_save):
    """Run the process for so long (`first_save`: after its first save); return the last step that it acknowledged.

    None: it acknowledged none.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            save_for_ever(path, writing)
        except BaseException as error:
            print(f"the saving process failed: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    os.close(writing)
    told = os.read(reading, 4) if first_save else b""
    time.sleep(wait_s)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "the saving process ended by itself"
    with open(reading, "rb") as pipe:
        told += pipe.read()
    return int.from_bytes(told[-4:], "little") if told else None


def main(path, num_kills):
    directory_module._MAX_SEGMENTS = 4  # compactions are killed as well
    source = random.Random(0)
    reference, num_done = RolloutHistory(window_epochs=3), 0
    acknowledged = num_half_way = 0
    for kill in range(num_kills):
        acknowledged = kill_after(path, source.uniform(0.0, 0.05), first_save=kill % 4 > 0) or acknowledged
        if not (path / directory_module.HEAD_NAME).exists():
            assert acknowledged == 0
            continue
        found = RolloutHistory(window_epochs=3)
        load_state(path, history=found)
        number = steps_done(found)
        assert acknowledged <= number <= acknowledged + 1, f"{number} is loaded, {acknowledged} was acknowledged"
        num_half_way += any(entry.name.endswith(".tmp") for entry in path.iterdir()) or number > acknowledged
        while num_done < number:
            advance(reference, num_done)
            num_done += 1
        assert contents(found) == contents(reference)
        acknowledged = number
    print(f"{num_kills} kills, {num_half_way} of them inside a save, {num_done} saves")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
