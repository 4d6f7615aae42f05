// A Python door to SGLang's n-gram trie (cpp_ngram), which ships behind tvm_ffi and torch; install.sh compiles it
// against the sources in SGLang's wheel. One call a request; SGLang's queue, worker thread and mutex are left out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trie.h"

namespace nb = nanobind;
namespace ngram = sglang::ngram;

using Tokens = std::vector<int32_t>;

class Corpus {
 public:
  Corpus(size_t capacity, size_t max_trie_depth, size_t min_bfs_breadth, size_t max_bfs_breadth,
         const std::string& match_type)
      : param_(make(max_trie_depth, min_bfs_breadth, max_bfs_breadth, match_type)), trie_(capacity, param_) {}

  void insert(Tokens tokens) {
    for (auto& token : tokens) ++token;
    trie_.insert(tokens.data(), tokens.size());
  }

  // The draft tree without its root, breadth first: token ids, and the index of each token's parent (-1: the root).
  // SGLang pads the tree to the full budget with token 0. The padding ends it here; ids are one higher inside the
  // trie, so that a real token 0 is not taken for padding.
  std::pair<Tokens, Tokens> match(int64_t request, Tokens tail, size_t total_length, size_t max_draft_tokens) {
    for (auto& token : tail) ++token;
    auto& state = states_[request];
    const auto build = param_.match_type == "BFS" ? &ngram::Trie::buildRecency : &ngram::Trie::buildFrequency;
    const auto result = (trie_.*build)(tail.data(), tail.size(), tail.back(), max_draft_tokens, param_, state,
                                       total_length);
    const size_t width = result.token.size();
    Tokens tokens, parents;
    for (size_t row = 1; row < width && result.token[row] != 0; ++row) {
      size_t parent = row - 1;
      while (!result.mask[row * width + parent]) --parent;  // ends at the root, every token's ancestor
      tokens.push_back(result.token[row] - 1);
      parents.push_back(static_cast<int32_t>(parent) - 1);
    }
    return {tokens, parents};
  }

  void erase(int64_t request) { states_.erase(request); }

 private:
  static ngram::Param make(size_t max_trie_depth, size_t min_bfs_breadth, size_t max_bfs_breadth,
                           const std::string& match_type) {
    ngram::Param param{};
    param.enable = true;
    param.max_trie_depth = max_trie_depth;
    param.min_bfs_breadth = min_bfs_breadth;
    param.max_bfs_breadth = max_bfs_breadth;
    param.match_type = match_type;
    return param;
  }

  ngram::Param param_;
  ngram::Trie trie_;
  std::unordered_map<int64_t, ngram::MatchState> states_;
};

NB_MODULE(das_bench_sglang_ngram, module) {
  module.attr("sglang_version") = SGLANG_VERSION;
  module.attr("node_bytes") = sizeof(ngram::TrieNode);
  nb::class_<Corpus>(module, "Corpus")
      .def(nb::init<size_t, size_t, size_t, size_t, const std::string&>())
      .def("insert", &Corpus::insert)
      .def("match", &Corpus::match)
      .def("erase", &Corpus::erase);
}
