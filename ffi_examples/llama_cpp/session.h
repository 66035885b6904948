// Session files: a text that a cache holds, so that a later process goes on from it.
//
// | offset | what |
// |---|---|
// | 0 | "SEKVSESS" |
// | 8 | version, u32: 1 |
// | 12 | tokens of the model's vocabulary, u32 |
// | 16 | tokens of the text, u64 |
// | 24 | bytes of the state, u64 |
// | 32 | FNV-1a of the header up to here, the tokens and the logits, u64 |
// | 40 | the tokens, i32 each |
// | ... | the logits after the last of them, f32 each, one for each token of the vocabulary |
// | ... | the state of the sequence, to the end |
//
// Numbers are little-endian. The state has checksums and the model's fingerprint of its own.
#pragma once

#include "engine.h"

#include <cstdint>
#include <string>
#include <vector>

namespace sekv_llama {

struct session {
    std::vector<llama_token> tokens;  // at positions 0, 1, ... of sequence 0
    std::vector<float> logits;        // after the last of them
};

// Both throw std::runtime_error with one sentence, and want an engine with libsekv.

// Writes the tokens that the engine holds, the logits after the last, and its state. The file is written beside the old one and
// takes its place when all of it is on the disk; only its owner can read it. Returns its bytes.
uint64_t save_session(const std::string & path, const std::vector<llama_token> & tokens, const float * logits, engine & engine);

// Puts a session in the place of what the engine holds. Of a file that is short, damaged, foreign or of
// another model nothing is taken.
session load_session(const std::string & path, engine & engine);

}  // namespace sekv_llama
