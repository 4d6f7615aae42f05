"""das in SGLang: `--speculative-algorithm DAS`, registered through SGLang's own plugin entry point.

SGLang calls `das_sglang.plugin.register` in each of its processes. That registers a name and nothing else: torch, the
worker and the history are loaded where the algorithm is selected.
"""
