#include "instruction_sets.h"

#include <atomic>
#include <stdexcept>

namespace tierbed {

extern const Loops baseline_loops;
#ifdef TIERBED_X86
extern const Loops avx2_loops, avx512_loops;
#endif

namespace {

std::vector<const Loops*> list_available() {
    std::vector<const Loops*> sets;
#ifdef TIERBED_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) sets.push_back(&avx512_loops);
    if (__builtin_cpu_supports("x86-64-v3")) sets.push_back(&avx2_loops);
#endif
    sets.push_back(&baseline_loops);
    return sets;
}

std::atomic<const Loops*> chosen_loops{list_available().front()};

}  // namespace

const Loops& loops() { return *chosen_loops; }

std::vector<std::string> list_instruction_sets() {
    std::vector<std::string> names;
    for (const Loops* set : list_available()) names.emplace_back(set->name);
    return names;
}

void use_instruction_set(const std::string& name) {
    for (const Loops* set : list_available()) {
        if (set->name != name) continue;
        chosen_loops = set;
        return;
    }
    throw std::invalid_argument("this processor does not support the instruction set " + name);
}

}  // namespace tierbed
