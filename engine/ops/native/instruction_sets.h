#pragma once
#include <string>
#include <vector>

#include "loops.h"

namespace tierbed {

// Returns the loops for the chosen instruction set, by default the best that this processor supports.
const Loops& loops();
// Returns the names of the instruction sets that this processor supports, best first.
std::vector<std::string> list_instruction_sets();
// For tests. Throws std::invalid_argument if this processor does not support the instruction set.
void use_instruction_set(const std::string& name);

}  // namespace tierbed
