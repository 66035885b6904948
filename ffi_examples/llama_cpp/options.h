// The command line of sekv-llama.
#pragma once

#include "llama.h"
#include "sekv.h"

#include <cstdint>
#include <string>

namespace sekv_llama {

struct program_options {
    program_options() = default;
    // `sekv` points into this object's texts.
    program_options(const program_options &) = delete;
    program_options & operator=(const program_options &) = delete;

    std::string model_path;
    std::string sidecar_path;
    std::string prompt;             // -p, after the file's text
    std::string prompt_file;        // -f
    std::string continuation_file;  // what --compare forces instead of the full cache's own words
    int32_t n_forced = 0;           // --forced N: hold back the prompt's last N tokens and force them
    std::string save_session;
    std::string load_session;
    std::string basis_folder;
    int32_t n_predict = 128;
    int32_t n_prompt_max = 0;       // cut the prompt to this many tokens; 0: all of it
    int32_t chunk = 512;
    int32_t n_threads = 0;          // 0: all cores
    ggml_type cache_type = GGML_TYPE_F16;
    float temperature = 0.0f;       // 0: greedy
    uint32_t seed = 1;
    bool raw = false;               // no chat template
    bool full = false;
    bool compare = false;
    bool chat = false;
    bool json = false;
    bool quiet_threads = true;
    bool feed_surprisal = false;
    sekv_params sekv = {};
};

// Throws std::runtime_error with one sentence. False: help was printed.
bool parse_options(int argument_count, char ** arguments, program_options & options);

// Names as on the command line; throw std::runtime_error on an unknown one.
int32_t parse_routing(const std::string & name);
int32_t parse_sketch(const std::string & name);
int32_t parse_codec(const std::string & name);

}  // namespace sekv_llama
