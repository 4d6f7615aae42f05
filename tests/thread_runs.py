"""Run functions on threads of their own, at once, and hear of every failure."""

import threading

TIMEOUT_S = 60


def run_threads(*functions):
    """Run the functions at once; raise what one of them raised."""
    errors = []
    barrier = threading.Barrier(len(functions))

    def run(function):
        try:
            barrier.wait(TIMEOUT_S)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
