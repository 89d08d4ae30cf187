// List scheduling: a device and a start for one task after the other, in a given order. Knows
// arrays of numbers only; which order and which pins make it HEFT, CPOP or DPOS is Python's to say
// (core/dpro/search/list_schedule.py).
#pragma once

#include <cstdint>
#include <vector>

namespace dpro {

// All pointers are borrowed and only read. Rows are tasks, tensors, devices, groups.
struct ScheduleInput {
    std::int32_t tasks, tensors, devices, links, lines, groups;
    const std::int32_t* order;       // [tasks] each after what it reads from
    const std::int64_t* time;        // [tasks, devices] ns; 0: the task waits for no device
    const std::int64_t* need;        // [tasks] bytes that it takes of its device
    const std::int32_t* together;    // [tasks] group, -1: none
    const std::int32_t* pinned;      // [tasks] device, -1: free
    const std::int64_t* read_begin;  // [tasks + 1] into `read`
    const std::int32_t* read;        // tensors that each task reads, each once
    const std::int32_t* producer;    // [tensors] task
    const std::int64_t* taken;       // [lines, tensors] ns of a transfer
    const std::int32_t* line;        // [devices, devices] row of `taken`
    const std::int32_t* link;        // [devices, devices] what the transfer occupies
    const std::int64_t* capacity;    // [devices] bytes, 0: no limit
    const std::int32_t* preference;  // [devices] smaller first among equal finish times
    bool insertion;                  // idle slots between tasks are used
    bool contention;                 // a transfer reserves a slot on its link
};

struct Sent {
    std::int32_t tensor, to;
    std::int64_t start, end;
};

struct ScheduleOutput {
    std::int32_t* device;  // [tasks]
    std::int64_t* start;   // [tasks] ns
    std::int64_t* end;     // [tasks] ns
    std::vector<Sent> sent;
    bool fits = true;  // no task was put where there was no room
};

// Throws std::invalid_argument when `order` puts a task before one that it reads from, or an index
// is out of range.
void schedule(const ScheduleInput& in, ScheduleOutput& out);

}  // namespace dpro
