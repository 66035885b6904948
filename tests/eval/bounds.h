// How much of the scan over sketches could bounds of scores save on recorded keys and queries?
#pragma once

#include "documents.h"
#include "engine.h"

#include <vector>

namespace sekv_eval {

// For the last queries of each document's prompt, all layers and heads: the share of blocks of 64
// sealed tokens in which no token reaches epsilon, and the shares that can be told from each
// channel's smallest and largest key, and from the keys' largest distance to their mean.
void print_bounds(const sekv_llama::loaded_model & model, const std::vector<document> & documents, int32_t n_threads);

}  // namespace sekv_eval
