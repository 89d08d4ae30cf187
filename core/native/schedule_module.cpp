// Python's door to list scheduling and the ranks before it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <stdexcept>

#include "ranks.hpp"
#include "schedule.hpp"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

py::tuple schedule(const Array<std::int32_t>& order, const Array<std::int64_t>& time, const Array<std::int64_t>& need,
                   const Array<std::int32_t>& together, const Array<std::int32_t>& pinned,
                   const Array<std::int64_t>& read_begin, const Array<std::int32_t>& read,
                   const Array<std::int32_t>& producer, const Array<std::int64_t>& taken,
                   const Array<std::int32_t>& line, const Array<std::int32_t>& link,
                   const Array<std::int64_t>& capacity, const Array<std::int32_t>& preference, std::int32_t links,
                   std::int32_t groups, bool insertion, bool contention) {
    const py::ssize_t tasks = order.size(), devices = capacity.size(), tensors = producer.size();
    constexpr py::ssize_t kMost = std::numeric_limits<std::int32_t>::max();
    if (tasks >= kMost || tensors >= kMost || devices >= kMost) throw std::invalid_argument("too many tasks");
    if (time.size() != tasks * devices || need.size() != tasks || together.size() != tasks || pinned.size() != tasks ||
        read_begin.size() != tasks + 1 || read_begin.at(0) != 0 || read_begin.at(tasks) != read.size() ||
        line.size() != devices * devices || link.size() != devices * devices || preference.size() != devices ||
        (tensors && taken.size() % tensors) || links < 0 || groups < 0) {
        throw std::invalid_argument("arrays of one schedule must agree in length");
    }
    const dpro::ScheduleInput in{
        static_cast<std::int32_t>(tasks), static_cast<std::int32_t>(tensors), static_cast<std::int32_t>(devices), links,
        static_cast<std::int32_t>(tensors ? taken.size() / tensors : kMost), groups, order.data(), time.data(),
        need.data(), together.data(), pinned.data(), read_begin.data(), read.data(), producer.data(), taken.data(),
        line.data(), link.data(), capacity.data(), preference.data(), insertion, contention};
    Array<std::int32_t> device(tasks);
    Array<std::int64_t> start(tasks), end(tasks);
    dpro::ScheduleOutput out{device.mutable_data(), start.mutable_data(), end.mutable_data(), {}, true};
    {
        py::gil_scoped_release released;
        dpro::schedule(in, out);
    }
    const auto sent = static_cast<py::ssize_t>(out.sent.size());
    Array<std::int64_t> moved({sent, py::ssize_t{4}});
    for (py::ssize_t i = 0; i < sent; ++i) {
        moved.mutable_at(i, 0) = out.sent[i].tensor;
        moved.mutable_at(i, 1) = out.sent[i].to;
        moved.mutable_at(i, 2) = out.sent[i].start;
        moved.mutable_at(i, 3) = out.sent[i].end;
    }
    return py::make_tuple(device, start, end, moved, out.fits);
}

dpro::Readers readers(const Array<std::int64_t>& begin, const Array<std::int32_t>& reader) {
    const py::ssize_t tasks = begin.size() - 1;
    if (tasks < 0 || tasks >= std::numeric_limits<std::int32_t>::max() || begin.at(0) != 0 ||
        begin.at(tasks) != reader.size()) {
        throw std::invalid_argument("readers of tasks must agree in length");
    }
    return {static_cast<std::int32_t>(tasks), begin.data(), reader.data()};
}

py::tuple topological(const Array<std::int64_t>& begin, const Array<std::int32_t>& reader) {
    const dpro::Readers in = readers(begin, reader);
    Array<std::int32_t> order(in.tasks);
    const std::int32_t count = dpro::topological(in, order.mutable_data());
    return py::make_tuple(order, count);
}

using Rank = void (*)(const dpro::Readers&, const std::int32_t*, const std::int64_t*, const std::int64_t*, std::int64_t*);

template <Rank rank>
Array<std::int64_t> ranked(const Array<std::int64_t>& begin, const Array<std::int32_t>& reader,
                           const Array<std::int32_t>& order, const Array<std::int64_t>& task_ns,
                           const Array<std::int64_t>& use_ns) {
    const dpro::Readers in = readers(begin, reader);
    if (order.size() != in.tasks || task_ns.size() != in.tasks || use_ns.size() != reader.size()) {
        throw std::invalid_argument("arrays of one rank must agree in length");
    }
    for (py::ssize_t i = 0; i < in.tasks; ++i) {
        if (order.at(i) < 0 || order.at(i) >= in.tasks) throw std::invalid_argument("no such task");
    }
    Array<std::int64_t> out(in.tasks);
    rank(in, order.data(), task_ns.data(), use_ns.data(), out.mutable_data());
    return out;
}

}  // namespace

void bind_schedule(py::module_& module) {
    module.def("topological", &topological, py::arg("begin").noconvert(), py::arg("reader").noconvert(),
               "Tasks, each after what it reads from, and how many could be ordered.");
    module.def("upward_rank", &ranked<dpro::upward_rank>, py::arg("begin").noconvert(), py::arg("reader").noconvert(),
               py::arg("order").noconvert(), py::arg("task_ns").noconvert(), py::arg("use_ns").noconvert(),
               "[tasks] the longest way from the begin of each task.");
    module.def("downward_rank", &ranked<dpro::downward_rank>, py::arg("begin").noconvert(),
               py::arg("reader").noconvert(), py::arg("order").noconvert(), py::arg("task_ns").noconvert(),
               py::arg("use_ns").noconvert(), "[tasks] the longest way to the begin of each task.");
    module.def("schedule", &schedule, py::arg("order").noconvert(), py::arg("time").noconvert(),
               py::arg("need").noconvert(), py::arg("together").noconvert(), py::arg("pinned").noconvert(),
               py::arg("read_begin").noconvert(), py::arg("read").noconvert(), py::arg("producer").noconvert(),
               py::arg("taken").noconvert(), py::arg("line").noconvert(), py::arg("link").noconvert(),
               py::arg("capacity").noconvert(), py::arg("preference").noconvert(), py::arg("links"), py::arg("groups"),
               py::arg("insertion"), py::arg("contention"),
               "Device, start, end [tasks] of every task, transfers [sent, 4], and whether all found room.");
}
