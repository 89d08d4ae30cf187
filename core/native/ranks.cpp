#include "ranks.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace dpro {

std::int32_t topological(const Readers& in, std::int32_t* order) {
    std::vector<std::int32_t> waits(in.tasks);
    for (std::int32_t task = 0; task < in.tasks; ++task) {
        if (in.begin[task] > in.begin[task + 1]) throw std::invalid_argument("readers must be in order");
    }
    for (std::int64_t use = 0; use < in.begin[in.tasks]; ++use) {
        const std::int32_t reader = in.reader[use];
        if (reader < 0 || reader >= in.tasks) throw std::invalid_argument("no such reader");
        ++waits[reader];
    }
    std::int32_t count = 0;
    for (std::int32_t task = 0; task < in.tasks; ++task) {
        if (waits[task] == 0) order[count++] = task;
    }
    for (std::int32_t next = 0; next < count; ++next) {
        for (std::int64_t use = in.begin[order[next]]; use < in.begin[order[next] + 1]; ++use) {
            if (--waits[in.reader[use]] == 0) order[count++] = in.reader[use];
        }
    }
    return count;
}

void upward_rank(const Readers& in, const std::int32_t* order, const std::int64_t* task_ns,
                 const std::int64_t* use_ns, std::int64_t* rank) {
    for (std::int32_t i = in.tasks - 1; i >= 0; --i) {
        const std::int32_t task = order[i];
        std::int64_t longest = 0;
        for (std::int64_t use = in.begin[task]; use < in.begin[task + 1]; ++use) {
            longest = std::max(longest, use_ns[use] + rank[in.reader[use]]);
        }
        rank[task] = task_ns[task] + longest;
    }
}

void downward_rank(const Readers& in, const std::int32_t* order, const std::int64_t* task_ns,
                   const std::int64_t* use_ns, std::int64_t* rank) {
    std::fill(rank, rank + in.tasks, 0);
    for (std::int32_t i = 0; i < in.tasks; ++i) {
        const std::int32_t task = order[i];
        for (std::int64_t use = in.begin[task]; use < in.begin[task + 1]; ++use) {
            std::int64_t& there = rank[in.reader[use]];
            there = std::max(there, rank[task] + task_ns[task] + use_ns[use]);
        }
    }
}

}  // namespace dpro
