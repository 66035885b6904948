#include "options.h"

#include "sekv_llama.h"

#include <cstdio>
#include <cstdlib>
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <stdexcept>
#include <thread>
#include <utility>

namespace sekv_llama {

namespace {

const char usage[] =
    R"(sekv-llama: text generation by stock llama.cpp with libsekv as its KV cache

  sekv-llama -m MODEL.gguf [-f DOCUMENT] [-p QUESTION] [--chat] [options]

What to read
  -m, --model FILE         the model, GGUF
  -f, --file FILE          prompt text from a file
  -p, --prompt TEXT        prompt text; follows the file's where both are given
      --raw                the text as it is, without the model's chat template
      --prompt-tokens N    cut the prompt to its first N tokens
  -n, --predict N          tokens to generate (128)
      --temp T, --seed S   sample at temperature T (0: greedy, the default)
      --chat               several turns: each line of standard input is one

Sessions
      --save-session FILE  save what the cache holds: before the answer, or at the end of a chat
      --load-session FILE  begin with it: of the prompt only what it does not hold is read; without
                           a prompt its own text is the prompt

Whose cache
      --full               llama.cpp's own cache instead of libsekv
      --compare            both, side by side: libsekv is fed what the full cache generates
      --forced N           with --compare: hold back the prompt's last N tokens and feed those
      --continuation FILE  with --compare: feed this text
      --cache-type T       llama.cpp's own cache: f32, f16 (default)

libsekv
      --routing NAME       ladder (default), paper
      --sketch NAME        auto (default), compact, standard, high, raw
      --no-value-sketch    without the value sketch
      --eps X              share from which a token is fetched
      --window N, --sinks N, --layout-tokens N
      --codec NAME         residents, means and basis: int8 (default), f16, f32
      --fetch-budget N     most tokens fetched a step and KV head (-1: no limit)
      --fast-budget BYTES  most bytes on the fast tier
      --basis-folder DIR   keep the slow tier in files there
      --basis-limit BYTES  most bytes in those files; the rest stays in memory
      --basis-io NAME      how they are read: mmap (default), pread
      --sidecar FILE       routing parameters of this model
      --surprisal          feed surprisal back (always so with --routing paper)

How to run
  -c, --chunk N            prompt tokens a pass (512)
  -t, --threads N          threads (all cores)
      --spin               keep llama.cpp's own threads, which spin between layers
      --json               one JSON object on standard output
  -h, --help
)";

int32_t named(const std::map<std::string, int32_t> & names, const std::string & name, const char * what) {
    const auto found = names.find(name);
    if (found == names.end()) {
        std::string known;
        for (const auto & entry : names) {
            known += (known.empty() ? "" : ", ") + entry.first;
        }
        throw std::runtime_error("unknown " + std::string(what) + " '" + name + "'; one of " + known + " was expected");
    }
    return found->second;
}

double parse_number(const std::string & option, const std::string & value) {
    char * end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0') {
        throw std::runtime_error(option + " got '" + value + "'; a number was expected");
    }
    return number;
}

int32_t parse_count(const std::string & option, const std::string & value, int32_t least) {
    const double number = parse_number(option, value);
    if (number != static_cast<int32_t>(number) || number < least) {
        throw std::runtime_error(option + " got " + value + "; a whole number of at least " + std::to_string(least) + " was expected");
    }
    return static_cast<int32_t>(number);
}

uint64_t parse_bytes(const std::string & option, const std::string & value) {
    const double number = parse_number(option, value);
    if (!(number >= 0.0 && number < 0x1p64 && number == std::floor(number))) {
        throw std::runtime_error(option + " got " + value + "; a whole number of bytes was expected");
    }
    return static_cast<uint64_t>(number);
}

void exclude(bool first, const char * first_name, bool second, const char * second_name) {
    if (first && second) {
        throw std::runtime_error(std::string(first_name) + " and " + second_name + " exclude each other");
    }
}

void require_compatible(const program_options & options) {
    exclude(options.full, "--full", options.compare, "--compare");
    // llama.cpp's own cache saves no session here, and has a fixed number of cells.
    for (const auto & [name, is_given] : {std::pair("--full", options.full), std::pair("--compare", options.compare)}) {
        exclude(is_given, name, !options.load_session.empty(), "--load-session");
        exclude(is_given, name, !options.save_session.empty(), "--save-session");
        exclude(is_given, name, options.chat, "--chat");
    }
    exclude(options.chat, "--chat", options.raw, "--raw");
    exclude(options.chat, "--chat", options.json, "--json");
    exclude(options.chat, "--chat", options.n_prompt_max > 0, "--prompt-tokens");
}

}  // namespace

int32_t parse_routing(const std::string & name) {
    return named({{"ladder", SEKV_ROUTING_LADDER}, {"paper", SEKV_ROUTING_PAPER}}, name, "routing");
}

int32_t parse_sketch(const std::string & name) {
    return named({{"auto", SEKV_SKETCH_AUTO}, {"compact", SEKV_SKETCH_COMPACT}, {"standard", SEKV_SKETCH_STANDARD},
                  {"high", SEKV_SKETCH_HIGH}, {"raw", SEKV_SKETCH_RAW}}, name, "sketch");
}

int32_t parse_codec(const std::string & name) {
    return named({{"f32", SEKV_CODEC_F32}, {"f16", SEKV_CODEC_F16}, {"int8", SEKV_CODEC_INT8}}, name, "codec");
}

bool parse_options(int argument_count, char ** arguments, program_options & options) {
    options.sekv = default_params();
    using value_handler = std::function<void(const std::string & option, const std::string & value)>;
    using flag_handler = std::function<void()>;
    sekv_params & sekv = options.sekv;
    std::map<std::string, value_handler> with_value;
    std::map<std::string, flag_handler> flags;

    const auto text = [](std::string & target) {
        return [&target](const std::string &, const std::string & value) { target = value; };
    };
    const auto count = [](int32_t & target, int32_t least) {
        return [&target, least](const std::string & option, const std::string & value) { target = parse_count(option, value, least); };
    };
    with_value["-m"] = with_value["--model"] = text(options.model_path);
    with_value["-f"] = with_value["--file"] = text(options.prompt_file);
    with_value["-p"] = with_value["--prompt"] = text(options.prompt);
    with_value["--continuation"] = text(options.continuation_file);
    with_value["--sidecar"] = text(options.sidecar_path);
    with_value["--save-session"] = text(options.save_session);
    with_value["--load-session"] = text(options.load_session);
    with_value["-n"] = with_value["--predict"] = count(options.n_predict, 0);
    with_value["-c"] = with_value["--chunk"] = count(options.chunk, 1);
    with_value["-t"] = with_value["--threads"] = count(options.n_threads, 1);
    with_value["--prompt-tokens"] = count(options.n_prompt_max, 1);
    with_value["--forced"] = count(options.n_forced, 1);
    with_value["--window"] = count(sekv.window, 0);
    with_value["--sinks"] = count(sekv.n_sinks, 0);
    with_value["--layout-tokens"] = count(sekv.layout_tokens, 1);
    with_value["--routing"] = [&](const std::string &, const std::string & value) { sekv.routing = parse_routing(value); };
    with_value["--sketch"] = [&](const std::string &, const std::string & value) { sekv.sketch = parse_sketch(value); };
    with_value["--codec"] = [&](const std::string &, const std::string & value) {
        sekv.codec_resident = sekv.codec_basis = sekv.codec_mean = parse_codec(value);
    };
    with_value["--eps"] = [&](const std::string & option, const std::string & value) {
        sekv.share_threshold = static_cast<float>(parse_number(option, value));
    };
    with_value["--fetch-budget"] = [&](const std::string & option, const std::string & value) {
        sekv.fetch_budget = parse_count(option, value, -1);
    };
    with_value["--fast-budget"] = [&](const std::string & option, const std::string & value) {
        sekv.fast_budget_bytes = parse_bytes(option, value);
    };
    with_value["--basis-folder"] = [&](const std::string &, const std::string & value) {
        options.basis_folder = value;
        sekv.basis_folder = options.basis_folder.c_str();
    };
    with_value["--basis-limit"] = [&](const std::string & option, const std::string & value) {
        sekv.basis_limit_bytes = parse_bytes(option, value);
    };
    with_value["--basis-io"] = [&](const std::string &, const std::string & value) {
        sekv.basis_io = named({{"mmap", SEKV_BASIS_MMAP}, {"pread", SEKV_BASIS_PREAD}}, value, "basis I/O");
    };
    with_value["--temp"] = [&](const std::string & option, const std::string & value) {
        options.temperature = static_cast<float>(parse_number(option, value));
    };
    with_value["--seed"] = [&](const std::string & option, const std::string & value) {
        options.seed = static_cast<uint32_t>(parse_number(option, value));
    };
    with_value["--cache-type"] = [&](const std::string &, const std::string & value) {
        options.cache_type = static_cast<ggml_type>(named({{"f32", GGML_TYPE_F32}, {"f16", GGML_TYPE_F16}, {"bf16", GGML_TYPE_BF16},
            {"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0}}, value, "cache type"));
    };
    flags["--raw"] = [&] { options.raw = true; };
    flags["--full"] = [&] { options.full = true; };
    flags["--compare"] = [&] { options.compare = true; };
    flags["--chat"] = [&] { options.chat = true; };
    flags["--json"] = [&] { options.json = true; };
    flags["--spin"] = [&] { options.quiet_threads = false; };
    flags["--surprisal"] = [&] { options.feed_surprisal = true; };
    flags["--no-value-sketch"] = [&] { sekv.value_sketch = 0; };

    for (int i = 1; i < argument_count; i++) {
        const std::string option = arguments[i];
        if (option == "-h" || option == "--help") {
            std::fputs(usage, stdout);
            return false;
        }
        if (const auto flag = flags.find(option); flag != flags.end()) {
            flag->second();
            continue;
        }
        const auto handler = with_value.find(option);
        if (handler == with_value.end()) {
            throw std::runtime_error("unknown option '" + option + "'; see --help");
        }
        if (i + 1 >= argument_count) {
            throw std::runtime_error(option + " needs a value");
        }
        handler->second(option, arguments[++i]);
    }

    if (options.model_path.empty()) {
        throw std::runtime_error("no model was given; -m FILE was expected (see --help)");
    }
    if (options.prompt.empty() && options.prompt_file.empty() && options.load_session.empty() && !options.chat) {
        throw std::runtime_error("no prompt was given; -p TEXT, -f FILE, --load-session FILE or --chat was expected");
    }
    require_compatible(options);
    if (options.n_threads == 0) {
        options.n_threads = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
    }
    sekv.n_threads = options.n_threads;
    sekv.n_seq_max = 1;
    options.feed_surprisal = options.feed_surprisal || sekv.routing == SEKV_ROUTING_PAPER;
    return true;
}

}  // namespace sekv_llama
