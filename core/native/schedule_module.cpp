// Python's door to list scheduling.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <stdexcept>

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

}  // namespace

void bind_schedule(py::module_& module) {
    module.def("schedule", &schedule, py::arg("order").noconvert(), py::arg("time").noconvert(),
               py::arg("need").noconvert(), py::arg("together").noconvert(), py::arg("pinned").noconvert(),
               py::arg("read_begin").noconvert(), py::arg("read").noconvert(), py::arg("producer").noconvert(),
               py::arg("taken").noconvert(), py::arg("line").noconvert(), py::arg("link").noconvert(),
               py::arg("capacity").noconvert(), py::arg("preference").noconvert(), py::arg("links"), py::arg("groups"),
               py::arg("insertion"), py::arg("contention"),
               "Device, start, end [tasks] of every task, transfers [sent, 4], and whether all found room.");
}
