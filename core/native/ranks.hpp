// Orders of tasks and the longest ways through them, for ranks (core/dpro/search/ranks.py).
#pragma once

#include <cstdint>

namespace dpro {

// Who reads what each task makes, in CSR form; borrowed and only read. A pair may be there twice.
struct Readers {
    std::int32_t tasks;
    const std::int64_t* begin;   // [tasks + 1]
    const std::int32_t* reader;  // [begin[tasks]]
};

// Writes tasks so that each comes after what it reads from, first in, first out; returns how many
// could be ordered. Throws std::invalid_argument when an index is out of range.
std::int32_t topological(const Readers& in, std::int32_t* order);

// rank[i] = task_ns[i] + max over readers j of (use_ns + rank[j]). `order` is of topological().
void upward_rank(const Readers& in, const std::int32_t* order, const std::int64_t* task_ns,
                 const std::int64_t* use_ns, std::int64_t* rank);

// rank[j] = max over those i that j reads from of (rank[i] + task_ns[i] + use_ns).
void downward_rank(const Readers& in, const std::int32_t* order, const std::int64_t* task_ns,
                   const std::int64_t* use_ns, std::int64_t* rank);

}  // namespace dpro
