// Several turns of a conversation, of which each reads only what is new.
#pragma once

#include "options.h"
#include "transcript.h"

#include <string>

namespace sekv_llama {

// Each line of standard input is a user's turn, to its end; blank ones are passed over. `first_turn`
// comes before them, where it isn't empty. Where it is, a transcript that isn't empty is what was said
// before: it is answered where it waits for an answer, and gone on from.
void chat(const loaded_model & model, const program_options & options, transcript & held, const std::string & first_turn);

}  // namespace sekv_llama
