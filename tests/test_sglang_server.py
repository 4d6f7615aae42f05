"""SGLang's HTTP server with das under the name NGRAM, started by a process that has loaded no plugin, as verl's is."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang_engines import NUM_SLOTS, OPTIONS, trained_model

from bench import tiny_llama

pytestmark = pytest.mark.sglang

PROMPTS = tiny_llama.prompts(6)
GREEDY = {"temperature": 0, "max_new_tokens": 48}
START = """
import json, sys

if __name__ == "__main__":  # not in the processes that this one starts, which import it as well
    import sglang.srt.plugins as plugins

    plugins._plugins_loaded = True  # a process that never loads plugins; those it starts do
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**json.loads(sys.argv[1])))
"""


class Server:
    """A running server's address, and ways to ask it."""

    def __init__(self, port):
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path, content=None):
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def generate(self, prompt, *, named=None, **sampling):
        content = {"input_ids": prompt, "sampling_params": GREEDY | sampling} | (named or {})
        answer = self.ask("/generate", content)
        return answer["output_ids"], answer["meta_info"]

    def das(self):
        return self.ask("/server_info")["internal_states"][0]["das"]


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    work = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (work / "start.py").write_text(START)
    arguments = OPTIONS | {
        "model_path": str(trained_model(request.config.cache)),
        "skip_tokenizer_init": False,
        "max_total_tokens": NUM_SLOTS,
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 8,
        "port": port,
    }
    environment = os.environ | {"DAS_SGLANG": json.dumps({"replace_ngram": True, "policy": "fixed:7"})}
    with (work / "log.txt").open("w") as log:
        command = [sys.executable, str(work / "start.py"), json.dumps(arguments)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            running = Server(port)
            deadline = time.monotonic() + 600
            while True:
                try:
                    running.ask("/health")
                    break
                except (urllib.error.URLError, ConnectionError):
                    text = (work / "log.txt").read_text()
                    assert process.poll() is None, text[-4000:]
                    assert time.monotonic() < deadline, text[-4000:]
                    time.sleep(1)
            yield running
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_ngram_is_das_and_concurrent_clients_get_what_one_client_gets(server):
    alone = [server.generate(prompt)[0] for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(server.generate, PROMPTS * 4))
    assert [tokens for tokens, _ in together] == alone * 4
    passes = [meta["spec_verify_ct"] for _, meta in together]
    assert sum(passes) < sum(map(len, alone)) * 4 / 2
    told = server.das()
    assert told["state"] == "drafting"
    assert told["settings"]["widths"] == [0, 3, 7]
    assert told["num_accepted_tokens"] > 0


def test_a_response_ends_at_its_stop_string_in_the_history_too(server):
    whole, _ = server.generate(PROMPTS[0], custom_params={"das_prompt_key": "stopped"})
    stopped, meta = server.generate(PROMPTS[0], stop=["+"], custom_params={"das_prompt_key": "stopped"})
    end = whole.index(tiny_llama.encode("+")[0]) + 1
    assert stopped == whole[:end]
    assert meta["finish_reason"]["matched"] == "+"
    before = server.das()["history"]
    server.generate(PROMPTS[0], stop=["+"], custom_params={"das_prompt_key": "stopped"})
    assert server.das()["history"]["num_tokens"] - before["num_tokens"] == end


@pytest.mark.parametrize(
    "names", [({"extra_key": "sums"}, {"extra_key": "sums"}), ({"rid": "das:sums 2/0"}, {"rid": "das:sums 2/1"})]
)
def test_extra_keys_and_request_ids_name_prompts(server, names):
    before = server.das()["history"]["num_prompts"]
    for prompt, named in zip(PROMPTS, names, strict=False):
        server.generate(prompt, named=named)
    assert server.das()["history"]["num_prompts"] == before + 1


def test_history_outlives_a_flush(server):
    server.generate(PROMPTS[1])
    server.ask("/flush_cache", {})
    _, meta = server.generate(PROMPTS[1])
    assert meta["spec_verify_ct"] <= meta["completion_tokens"] / 3


def test_a_prompts_history_comes_over_the_corpus_endpoints(server):
    sampling = {"custom_params": {"das_prompt_key": "from outside"}}
    prompt = [*PROMPTS[2], *PROMPTS[2]]  # never seen
    text = "".join(tiny_llama.CHARACTERS[token] for token in server.generate(prompt)[0] if token < tiny_llama.PAD)
    loaded = server.ask("/add_external_corpus", {"corpus_id": "from outside", "documents": ["=" + text]})
    assert loaded["success"], loaded
    _, meta = server.generate(prompt, **sampling)
    assert meta["spec_verify_ct"] <= meta["completion_tokens"] / 3
    assert "from outside" in json.dumps(server.ask("/list_external_corpora"))
    try:
        removed = json.dumps(server.ask("/remove_external_corpus", {"corpus_id": "from outside"}))
    except urllib.error.HTTPError as error:
        removed = error.read().decode()
    assert "nothing to remove by name" in removed
    assert server.das()["state"] == "drafting"
