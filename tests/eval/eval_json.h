// target/eval.json
#pragma once

#include "fidelity.h"
#include "needles.h"

#include <string>
#include <vector>

namespace sekv_eval {

// {"rows": [...], "needles": [...]}; throws when the file can't be written.
void write_eval_json(const std::string & path, const std::vector<fidelity_row> & rows, const std::vector<needle_row> & needles);

}  // namespace sekv_eval
