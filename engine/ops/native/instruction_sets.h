// Chooses the build of the loops that runs.
#pragma once
#include <string>
#include <vector>

#include "loops.h"

namespace tierbed {

// The loops for the best instruction set that this processor has, unless another was chosen.
const Loops& loops();
// The names of the instruction sets that this processor has, the best first.
std::vector<std::string> instruction_sets();
// For tests. Throws std::invalid_argument if this processor lacks it.
void use_instruction_set(const std::string& name);

}  // namespace tierbed
