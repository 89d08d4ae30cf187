// Earliest finish times as in FastT (Middleware 2020, section 5.1), with slots that are reserved on
// links as well where that is asked for: the published rule starts any number of transfers on one
// link at once, and its plans lose in replay what they won on paper.
#include "schedule.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace dpro {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// In place of a device: the task's turn was not yet, or it goes where the first of its readers goes.
constexpr std::int32_t kUnseen = -1, kFloating = -2;

struct Span {
    std::int64_t begin, end;
};

// When one device or link is busy: spans in order that neither overlap nor touch.
class Timeline {
  public:
    // The first time from `ready` on with `length` idle after it.
    std::int64_t find(std::int64_t ready, std::int64_t length) const {
        auto next = std::upper_bound(busy_.begin(), busy_.end(), ready,
                                     [](std::int64_t time, const Span& span) { return time < span.end; });
        for (; next != busy_.end() && next->begin < ready + length; ++next) ready = std::max(ready, next->end);
        return ready;
    }

    std::int64_t last() const { return busy_.empty() ? 0 : busy_.back().end; }

    void add(std::int64_t begin, std::int64_t end) {
        if (begin == end) return;
        auto next = std::upper_bound(busy_.begin(), busy_.end(), begin,
                                     [](std::int64_t time, const Span& span) { return time < span.begin; });
        const bool joins_next = next != busy_.end() && next->begin == end;
        const bool joins_last = next != busy_.begin() && std::prev(next)->end == begin;
        if (joins_last && joins_next) {
            std::prev(next)->end = next->end;
            busy_.erase(next);
        } else if (joins_last) {
            std::prev(next)->end = end;
        } else if (joins_next) {
            next->begin = begin;
        } else {
            busy_.insert(next, {begin, end});
        }
    }

  private:
    std::vector<Span> busy_;
};

class Scheduler {
  public:
    Scheduler(const ScheduleInput& in, ScheduleOutput& out)
        : in_(in), out_(out), devices_(in.devices), links_(in.links), free_(in.capacity, in.capacity + in.devices),
          arrival_(static_cast<std::size_t>(in.tensors) * in.devices, -1), home_(in.groups, -1), group_need_(in.groups) {
        for (std::int32_t d = 0; d < in_.devices; ++d) {
            if (in_.capacity[d] == 0) free_[d] = kNever;
        }
        for (std::int32_t task = 0; task < in_.tasks; ++task) {
            out_.device[task] = kUnseen;
            if (in_.together[task] >= 0) group_need_[in_.together[task]] += in_.need[task];
        }
    }

    void run() {
        for (std::int32_t i = 0; i < in_.tasks; ++i) {
            const std::int32_t task = in_.order[i];
            if (floats(task)) {
                out_.device[task] = kFloating;
            } else {
                put(task, choose(task));
            }
        }
        for (std::int32_t task = 0; task < in_.tasks; ++task) {
            if (out_.device[task] == kFloating) put(task, choose(task));
        }
    }

  private:
    struct Moved {
        std::int32_t link;
        Sent sent;
    };

    const ScheduleInput& in_;
    ScheduleOutput& out_;
    std::vector<Timeline> devices_, links_;
    std::vector<std::int64_t> free_;        // [devices] bytes
    std::vector<std::int64_t> arrival_;     // [tensors, devices] -1: not sent there
    std::vector<std::int32_t> home_;        // [groups] device, -1: none yet
    std::vector<std::int64_t> group_need_;  // [groups]
    std::vector<Moved> moved_;              // transfers that the task last looked at needs
    std::vector<std::int32_t> waiting_;

    // A variable: any device is as good for it, only its readers know better.
    bool floats(std::int32_t task) const {
        if (fixed(task) >= 0 || in_.read_begin[task] != in_.read_begin[task + 1]) return false;
        for (std::int32_t d = 0; d < in_.devices; ++d) {
            if (time(task, d) != 0) return false;
        }
        return true;
    }

    // Where `task` must go, -1: anywhere.
    std::int32_t fixed(std::int32_t task) const {
        const std::int32_t group = in_.together[task];
        return group >= 0 && home_[group] >= 0 ? home_[group] : in_.pinned[task];
    }

    // What `task` takes of a device where it is the first of its group, or in none.
    std::int64_t own_need(std::int32_t task) const {
        const std::int32_t group = in_.together[task];
        return group < 0 ? in_.need[task] : home_[group] < 0 ? group_need_[group] : 0;
    }

    // With what goes where it goes.
    std::int64_t need(std::int32_t task) const {
        std::int64_t bytes = own_need(task);
        for (std::int64_t r = in_.read_begin[task]; r < in_.read_begin[task + 1]; ++r) {
            const std::int32_t from = in_.producer[in_.read[r]];
            if (out_.device[from] == kFloating && fixed(from) < 0) bytes += own_need(from);
        }
        return bytes;
    }

    std::int32_t choose(std::int32_t task) {
        if (fixed(task) >= 0) return fixed(task);
        const std::int64_t bytes = need(task);
        std::int32_t best = -1;
        std::int64_t earliest = kNever;
        for (std::int32_t d = 0; d < in_.devices; ++d) {
            if (bytes > free_[d]) continue;
            const std::int64_t end = start(task, d) + time(task, d);
            if (best < 0 || end < earliest || (end == earliest && in_.preference[d] < in_.preference[best])) {
                best = d;
                earliest = end;
            }
        }
        // no room anywhere: where most is left
        if (best < 0) best = static_cast<std::int32_t>(std::max_element(free_.begin(), free_.end()) - free_.begin());
        return best;
    }

    std::int64_t time(std::int32_t task, std::int32_t device) const {
        return in_.time[static_cast<std::int64_t>(task) * in_.devices + device];
    }

    // The earliest start of `task` on `device`; leaves in `moved_` what must be sent there before.
    std::int64_t start(std::int32_t task, std::int32_t device) {
        settle(task, kUnseen);
        moved_.clear();
        waiting_.clear();
        std::int64_t ready = 0;
        for (std::int64_t r = in_.read_begin[task]; r < in_.read_begin[task + 1]; ++r) {
            const std::int32_t tensor = in_.read[r], from = in_.producer[tensor];
            if (out_.device[from] == kFloating) continue;
            if (out_.device[from] == kUnseen) throw std::invalid_argument("a task comes before one that it reads from");
            const std::int64_t there = arrival_[static_cast<std::int64_t>(tensor) * in_.devices + device];
            if (out_.device[from] == device) {
                ready = std::max(ready, out_.end[from]);
            } else if (there >= 0) {
                ready = std::max(ready, there);
            } else {
                waiting_.push_back(tensor);
            }
        }
        // what is there first goes first
        std::sort(waiting_.begin(), waiting_.end(), [this](std::int32_t a, std::int32_t b) {
            const std::int64_t ends[] = {out_.end[in_.producer[a]], out_.end[in_.producer[b]]};
            return ends[0] < ends[1] || (ends[0] == ends[1] && a < b);
        });
        for (const std::int32_t tensor : waiting_) {
            const std::int64_t pair = static_cast<std::int64_t>(out_.device[in_.producer[tensor]]) * in_.devices + device;
            const std::int64_t taken = in_.taken[static_cast<std::int64_t>(in_.line[pair]) * in_.tensors + tensor];
            std::int64_t begin = out_.end[in_.producer[tensor]];
            if (in_.contention) begin = slot(in_.link[pair], begin, taken);
            moved_.push_back({in_.link[pair], {tensor, device, begin, begin + taken}});
            ready = std::max(ready, begin + taken);
        }
        const std::int64_t length = time(task, device);
        if (length == 0) return ready;
        return in_.insertion ? devices_[device].find(ready, length) : std::max(ready, devices_[device].last());
    }

    // Puts what `task` reads from and floats where it must go, else on `device` (kUnseen: not yet).
    void settle(std::int32_t task, std::int32_t device) {
        for (std::int64_t r = in_.read_begin[task]; r < in_.read_begin[task + 1]; ++r) {
            const std::int32_t from = in_.producer[in_.read[r]];
            if (out_.device[from] != kFloating) continue;
            const std::int32_t home = fixed(from) >= 0 ? fixed(from) : device;
            if (home != kUnseen) put(from, home);
        }
    }

    // A slot on a link beside what is booked there and what `moved_` is about to book.
    std::int64_t slot(std::int32_t link, std::int64_t ready, std::int64_t length) const {
        for (bool found = false; !found;) {
            ready = links_[link].find(ready, length);
            found = true;
            for (const Moved& other : moved_) {
                if (other.link == link && other.sent.start < ready + length && other.sent.end > ready) {
                    ready = other.sent.end;
                    found = false;
                }
            }
        }
        return ready;
    }

    void put(std::int32_t task, std::int32_t device) {
        settle(task, device);
        const std::int32_t group = in_.together[task];
        const std::int64_t bytes = own_need(task);
        if (bytes > free_[device]) out_.fits = false;
        if (in_.capacity[device] != 0) free_[device] -= bytes;
        if (group >= 0) home_[group] = device;
        const std::int64_t begin = start(task, device);
        out_.device[task] = device;
        out_.start[task] = begin;
        out_.end[task] = begin + time(task, device);
        devices_[device].add(begin, out_.end[task]);
        for (const Moved& one : moved_) {
            links_[one.link].add(one.sent.start, one.sent.end);
            arrival_[static_cast<std::int64_t>(one.sent.tensor) * in_.devices + device] = one.sent.end;
            out_.sent.push_back(one.sent);
        }
    }
};

void check(bool right, const char* what) {
    if (!right) throw std::invalid_argument(what);
}

}  // namespace

void schedule(const ScheduleInput& in, ScheduleOutput& out) {
    const std::int64_t pairs = static_cast<std::int64_t>(in.devices) * in.devices;
    check(in.devices > 0, "a device is needed");
    std::vector<bool> seen(in.tasks);
    for (std::int32_t i = 0; i < in.tasks; ++i) {
        check(in.order[i] >= 0 && in.order[i] < in.tasks && !seen[in.order[i]], "the order names each task once");
        seen[in.order[i]] = true;
        check(in.together[i] >= -1 && in.together[i] < in.groups, "no such group");
        check(in.pinned[i] >= -1 && in.pinned[i] < in.devices, "no such device");
        check(in.read_begin[i] <= in.read_begin[i + 1], "reads must be in order");
    }
    for (std::int64_t r = 0; r < in.read_begin[in.tasks]; ++r) {
        check(in.read[r] >= 0 && in.read[r] < in.tensors, "no such tensor");
    }
    for (std::int32_t t = 0; t < in.tensors; ++t) {
        check(in.producer[t] >= 0 && in.producer[t] < in.tasks, "no such producer");
    }
    for (std::int64_t p = 0; p < pairs; ++p) {
        if (p / in.devices == p % in.devices) continue;
        check(in.link[p] >= 0 && in.link[p] < in.links && in.line[p] >= 0 && in.line[p] < in.lines, "no such link");
    }
    Scheduler(in, out).run();
}

}  // namespace dpro
