// Time as the programs measure it.
#pragma once

#include <chrono>

namespace sekv_llama {

// Only differences mean something.
inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace sekv_llama
