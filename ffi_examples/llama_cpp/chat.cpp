#include "chat.h"

#include "generation.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <utility>
#include <vector>

namespace sekv_llama {

namespace {

// A conversation, and the tokens that the model's template makes of it.
class conversation {
public:
    // `opening`: what was said before, whose messages nobody knows any more; empty: nothing was.
    conversation(const loaded_model & model, std::vector<llama_token> opening)
        : model_(model), opening_(std::move(opening)) {}

    void say(const std::string & role, const std::string & content) { messages_.push_back({role, content}); }

    // Up to where the assistant's next words come.
    std::vector<llama_token> tokens() const {
        if (opening_.empty()) {
            return model_.tokenize(model_.chat_text(messages_, true), true);
        }
        // Behind an answer, any answer, the template goes on alike: that is what follows the opening.
        std::vector<chat_message> messages = {stand_in("user")};
        const std::string before = model_.chat_text(messages, true) + stand_in("assistant").content;
        messages.push_back(stand_in("assistant"));
        messages.insert(messages.end(), messages_.begin(), messages_.end());
        const std::string added_text = behind(before, model_.chat_text(messages, true));
        std::vector<llama_token> tokens = opening_;
        const std::vector<llama_token> added = model_.tokenize(added_text, true, false);
        tokens.insert(tokens.end(), added.begin(), added.end());
        return tokens;
    }

    // Whether the opening ends where an answer begins.
    bool opening_waits() const {
        const std::string asked = model_.chat_text({stand_in("user")}, false);
        const std::string answer_begins = behind(asked, model_.chat_text({stand_in("user")}, true));
        const std::vector<llama_token> tail = model_.tokenize(answer_begins, true, false);
        return !tail.empty() && tail.size() <= opening_.size() && std::equal(tail.rbegin(), tail.rend(), opening_.rbegin());
    }

    // What the assistant has said to an opening that waited for it.
    void extend_opening(const std::vector<llama_token> & tokens) { opening_ = tokens; }

private:
    static chat_message stand_in(const std::string & role) { return {role, "-"}; }

    // What a longer conversation's text adds to a shorter one's.
    static std::string behind(const std::string & shorter, const std::string & longer) {
        if (longer.compare(0, shorter.size(), shorter) != 0) {
            throw std::runtime_error("this model's chat template rewrites earlier turns; a chat from a session needs one that only adds");
        }
        return longer.substr(shorter.size());
    }

    const loaded_model & model_;
    std::vector<llama_token> opening_;
    std::vector<chat_message> messages_;
};

// False at the input's end.
bool read_turn(std::string & text) {
    do {
        if (isatty(STDIN_FILENO)) {
            std::fputs("> ", stderr);
        }
        if (!std::getline(std::cin, text)) {
            return false;
        }
    } while (text.find_first_not_of(" \t\r") == std::string::npos);
    return true;
}

}  // namespace

void chat(const loaded_model & model, const program_options & options, transcript & held, const std::string & first_turn) {
    conversation said(model, first_turn.empty() ? held.tokens() : std::vector<llama_token>());
    token_chooser chooser(options, model.n_vocab());
    speed speed;
    int32_t n_turns = 0;
    // A line for each turn is enough of a log.
    const char * label = isatty(STDERR_FILENO) ? "reading" : "";
    const auto answer = [&](const std::vector<llama_token> & tokens) {
        const transcript::reading reading = held.read(tokens, label);
        n_turns++;
        std::fprintf(stderr, "turn %d: %d tokens kept, %d read\n", n_turns, reading.n_kept, reading.n_read);
        const std::string text = generate_text(model, held, chooser, options.n_predict, true, speed);
        std::fputs("\n", stdout);
        std::fflush(stdout);
        return text;
    };

    std::string turn = first_turn;
    if (turn.empty() && said.opening_waits()) {
        answer(held.tokens());
        said.extend_opening(held.tokens());
    }
    while (!turn.empty() || read_turn(turn)) {
        said.say("user", turn);
        said.say("assistant", answer(said.tokens()));
        turn.clear();
    }
}

}  // namespace sekv_llama
