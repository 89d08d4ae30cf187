// The replay engine: when does every op of a graph start and end, given that a resource runs one
// op at a time? Knows arrays of numbers only: no Python, no names, no kinds of ops.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dpro {

// A graph of `ops` ops (rows). All pointers are borrowed and only read.
struct ReplayInput {
    std::int32_t ops;
    std::int32_t resources;
    std::int64_t edges;
    const std::int32_t* resource;  // [ops] -1: none, the op starts as soon as it is eligible
    const std::int64_t* duration;  // [ops] ns, >= 0
    const std::int64_t* gap;       // [ops] ns, >= 0
    const std::int32_t* priority;  // [ops] smaller first
    const std::int64_t* indptr;    // [ops + 1]
    const std::int32_t* indices;   // [edges] successors
};

// Written by replay(); rows that never run (they are in a cycle, or behind one) keep start = -1.
struct ReplayOutput {
    std::int64_t* start;  // [ops] ns
    std::int64_t* end;    // [ops] ns
    std::int32_t* cause;  // [ops]
};

struct ReplaySummary {
    std::int32_t done;           // ops that ran
    std::int64_t makespan;       // ns
    std::size_t working_bytes;   // peak of what the engine allocated besides input and output
};

// Throws std::invalid_argument when the input is not a graph (an index out of range, a negative
// time, times whose sum does not fit 62 bits).
ReplaySummary replay(const ReplayInput& in, const ReplayOutput& out);

}  // namespace dpro
