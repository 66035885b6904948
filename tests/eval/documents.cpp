#include "documents.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace sekv_eval {

namespace {

// No text needs more bytes a token than this, so a longer stretch needn't be tokenised.
constexpr size_t most_bytes_per_token = 16;

}  // namespace

std::string read_text(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error("the file " + path + " could not be read; ffi_examples/llama_cpp/fetch.sh texts fetches the texts");
    }
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

std::vector<std::vector<std::string>> read_table(const std::string & path, size_t n_columns) {
    std::istringstream lines(read_text(path));
    std::vector<std::vector<std::string>> table;
    std::string line;
    while (std::getline(lines, line)) {
        if (line.empty() || line[0] == '#') {
            continue;
        }
        std::vector<std::string> fields;
        std::istringstream rest(line);
        std::string field;
        while (std::getline(rest, field, '\t')) {
            fields.push_back(field);
        }
        if (fields.size() != n_columns) {
            throw std::runtime_error(path + " has a line with " + std::to_string(fields.size()) + " columns, " +
                                     std::to_string(n_columns) + " were expected: " + line);
        }
        table.push_back(std::move(fields));
    }
    return table;
}

std::string token_hash(const std::vector<llama_token> & tokens) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const llama_token token : tokens) {
        for (int shift = 0; shift < 32; shift += 8) {
            hash = (hash ^ ((static_cast<uint32_t>(token) >> shift) & 0xff)) * 0x100000001b3ull;
        }
    }
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

std::vector<llama_token> read_tokens(const sekv_llama::loaded_model & model, const places & places, const std::string & text,
                                     size_t offset, int32_t n_tokens) {
    const std::string whole = read_text(places.texts() + text);
    if (offset >= whole.size()) {
        throw std::runtime_error(text + " ends before byte " + std::to_string(offset));
    }
    std::vector<llama_token> tokens = model.tokenize(whole.substr(offset, n_tokens * most_bytes_per_token), false);
    if (static_cast<int32_t>(tokens.size()) < n_tokens) {
        throw std::runtime_error(text + " has " + std::to_string(tokens.size()) + " tokens from byte " + std::to_string(offset) +
                                 " on; " + std::to_string(n_tokens) + " were expected");
    }
    tokens.resize(n_tokens);
    return tokens;
}

std::vector<document> read_documents(const sekv_llama::loaded_model & model, const places & places, const std::string & list) {
    std::vector<document> documents;
    for (const std::vector<std::string> & line : read_table(places.lists() + list, 7)) {
        document document;
        document.name = line[0];
        document.kind = line[1];
        document.n_prompt = std::atoi(line[4].c_str());
        document.n_forced = std::atoi(line[5].c_str());
        document.tokens = read_tokens(model, places, line[2], std::strtoul(line[3].c_str(), nullptr, 10),
                                      document.n_prompt + document.n_forced + 1);
        const std::string hash = token_hash(document.tokens);
        if (line[6] == "-") {
            std::fprintf(stderr, "%s: %s has the hash %s\n", list.c_str(), line[0].c_str(), hash.c_str());
        } else if (line[6] != hash) {
            throw std::runtime_error(list + ": " + line[0] + " has the token hash " + hash + "; " + line[6] + " was expected");
        }
        documents.push_back(std::move(document));
    }
    return documents;
}

}  // namespace sekv_eval
