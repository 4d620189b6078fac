// The device side of the harness.
//
// What makes a race show: every second run shares the GPU with a second stream that keeps parts of
// it busy for a varying time, which moves the kernel's blocks and warps against each other. What
// makes an element that is not written show: out and lse are filled before each run, with another
// pattern in odd runs than in even ones.

#include <cuda_runtime.h>

#include <algorithm>

#include "tests/harness/device_runs.h"

namespace jax_fa::harness {
namespace {

constexpr size_t kGuardBytes = 256;
constexpr int kEvenFill = 0xff;  // NaN in every dtype
constexpr int kOddFill = 0xfe;   // NaN or a huge number
constexpr int kCompareThreads = 256;
constexpr int kCompareBlocks = 512;

// The first error of a sequence of CUDA calls.
class Status {
 public:
  bool Check(cudaError_t error, const char* what) {
    if (error != cudaSuccess && text_.empty()) {
      text_ = std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
    }
    return error == cudaSuccess;
  }
  bool ok() const { return text_.empty(); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Device memory for `bytes` bytes whose start lies `shift` bytes off the allocation's alignment.
class DeviceArray {
 public:
  DeviceArray(size_t bytes, size_t shift, Status& status) : bytes_(bytes), shift_(shift) {
    status.Check(cudaMalloc(&base_, bytes + shift + kGuardBytes), "cudaMalloc");
  }
  ~DeviceArray() { cudaFree(base_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  template <typename T>
  void Upload(const std::vector<T>& host, Status& status) {
    if (host.empty()) return;
    status.Check(cudaMemcpy(data(), host.data(), bytes_, cudaMemcpyHostToDevice), "copy to device");
  }
  void Download(void* host, Status& status) const {
    if (bytes_ == 0) return;
    status.Check(cudaMemcpy(host, data(), bytes_, cudaMemcpyDeviceToHost), "copy to host");
  }
  uint8_t* data() const { return static_cast<uint8_t*>(base_) + shift_; }
  size_t bytes() const { return bytes_; }

 private:
  void* base_ = nullptr;
  size_t bytes_;
  size_t shift_;
};

// 16-bit units, the common size of all dtypes. Whether they differ, not by how much: NaN equals
// itself here, and -0 does not equal 0.
__global__ void CompareUnits(const uint16_t* first, const uint16_t* now, int64_t units,
                             unsigned int* differs, unsigned long long* first_unit) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < units;
       i += stride) {
    if (first[i] != now[i]) {
      atomicOr(differs, 1u);
      atomicMin(first_unit, static_cast<unsigned long long>(i));
    }
  }
}

__global__ void Spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

// The arrays of one case on the device.
struct DeviceCase {
  DeviceCase(const Case& c, const Inputs& inputs, int64_t runs, Status& status)
      : q(inputs.q.bytes.size(), Shift(c, c.problem.q_dtype), status),
        k(inputs.k.bytes.size(), Shift(c, c.problem.kv_dtype), status),
        v(inputs.v.bytes.size(), Shift(c, c.problem.kv_dtype), status),
        positions(inputs.positions.size() * sizeof(int32_t), 0, status),
        layer(c.layer_batch == 0 ? 0 : sizeof(int32_t), 0, status),
        starts(inputs.starts.size() * sizeof(int32_t), 0, status),
        sinks(inputs.sinks.size() * sizeof(float), 0, status),
        out(inputs.q.bytes.size(), Shift(c, c.problem.q_dtype), status),
        first_out(out.bytes(), 0, status),
        lse(c.with_lse ? c.problem.rows() * sizeof(float) : 0, 0, status),
        first_lse(lse.bytes(), 0, status),
        differs(runs * sizeof(unsigned int), 0, status),
        first_units(2 * sizeof(unsigned long long), 0, status) {
    if (!status.ok()) return;
    q.Upload(inputs.q.bytes, status);
    k.Upload(inputs.k.bytes, status);
    v.Upload(inputs.v.bytes, status);
    positions.Upload(inputs.positions, status);
    if (c.layer_batch != 0) layer.Upload(std::vector<int32_t>{c.layer}, status);
    starts.Upload(inputs.starts, status);
    sinks.Upload(inputs.sinks, status);
    status.Check(cudaMemset(differs.data(), 0, differs.bytes()), "cudaMemset");
    status.Check(cudaMemset(first_units.data(), 0xff, first_units.bytes()), "cudaMemset");
    static_cast<AttentionProblem&>(params) = c.problem;
    params.q = q.data();
    params.k = k.data();
    params.v = v.data();
    params.positions = reinterpret_cast<const int32_t*>(positions.data());
    if (c.layer_batch != 0) params.layer = reinterpret_cast<const int32_t*>(layer.data());
    params.layer_batch = c.layer_batch;
    if (c.problem.has_starts) params.starts = reinterpret_cast<const int32_t*>(starts.data());
    params.starts_by_row = c.starts == Starts::kByRow;
    if (c.problem.has_sinks) params.sinks = reinterpret_cast<const float*>(sinks.data());
    params.sinks_by_sequence = c.sinks == Sinks::kBySequence;
    params.out = out.data();
    params.lse = c.with_lse ? reinterpret_cast<float*>(lse.data()) : nullptr;
  }

  static size_t Shift(const Case& c, DType dtype) { return c.misalignment * DTypeBytes(dtype); }

  DeviceArray q, k, v, positions, layer, starts, sinks, out, first_out, lse, first_lse;
  DeviceArray differs;      // one flag a run
  DeviceArray first_units;  // lowest differing unit of out, of lse
  AttentionParams params;
};

void Fill(const DeviceArray& array, int byte, cudaStream_t stream, Status& status) {
  if (array.bytes() == 0) return;
  status.Check(cudaMemsetAsync(array.data(), byte, array.bytes(), stream), "cudaMemsetAsync");
}

// Keeps the first run's output, or compares this run's with it.
void KeepOrCompare(const DeviceArray& first, const DeviceArray& now, unsigned long long* first_unit,
                   unsigned int* differs, bool keep, cudaStream_t stream, Status& status) {
  if (now.bytes() == 0) return;
  if (keep) {
    status.Check(
        cudaMemcpyAsync(first.data(), now.data(), now.bytes(), cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpyAsync");
    return;
  }
  CompareUnits<<<kCompareBlocks, kCompareThreads, 0, stream>>>(
      reinterpret_cast<const uint16_t*>(first.data()),
      reinterpret_cast<const uint16_t*>(now.data()), now.bytes() / sizeof(uint16_t), differs,
      first_unit);
  status.Check(cudaGetLastError(), "CompareUnits");
}

// Streams and a pair of events a run, for timing.
struct Streams {
  Streams(int64_t runs, Status& status) : begin(runs), end(runs) {
    status.Check(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking), "cudaStreamCreate");
    status.Check(cudaStreamCreateWithFlags(&noise, cudaStreamNonBlocking), "cudaStreamCreate");
    for (cudaEvent_t& event : begin) status.Check(cudaEventCreate(&event), "cudaEventCreate");
    for (cudaEvent_t& event : end) status.Check(cudaEventCreate(&event), "cudaEventCreate");
  }
  ~Streams() {
    for (cudaEvent_t event : begin) cudaEventDestroy(event);
    for (cudaEvent_t event : end) cudaEventDestroy(event);
    cudaStreamDestroy(main);
    cudaStreamDestroy(noise);
  }
  cudaStream_t main = nullptr;
  cudaStream_t noise = nullptr;
  std::vector<cudaEvent_t> begin, end;
};

void RunOnce(const cuda::Kernel& kernel, DeviceCase& device, Streams& streams, int64_t run,
             Status& status) {
  const bool is_odd = run % 2 == 1;
  Fill(device.out, is_odd ? kOddFill : kEvenFill, streams.main, status);
  Fill(device.lse, is_odd ? kOddFill : kEvenFill, streams.main, status);
  if (is_odd) {
    // Some blocks, some tens of microseconds, another mix each time.
    Spin<<<16 + 48 * (run % 7), 64 + 32 * (run % 5), 0, streams.noise>>>(20000 + 9000 * (run % 11));
    status.Check(cudaGetLastError(), "Spin");
  }
  status.Check(cudaEventRecord(streams.begin[run], streams.main), "cudaEventRecord");
  status.Check(kernel.launch(device.params, streams.main), kernel.name);
  status.Check(cudaEventRecord(streams.end[run], streams.main), "cudaEventRecord");
  auto* first_units = reinterpret_cast<unsigned long long*>(device.first_units.data());
  auto* differs = reinterpret_cast<unsigned int*>(device.differs.data()) + run;
  KeepOrCompare(device.first_out, device.out, first_units, differs, run == 0, streams.main, status);
  KeepOrCompare(device.first_lse, device.lse, first_units + 1, differs, run == 0, streams.main,
                status);
}

void ReadTimes(const Streams& streams, RunsResult& result, Status& status) {
  std::vector<float> times;
  for (int64_t run = 0; run < result.runs; run += 2) {  // odd runs share the GPU
    float ms = 0.0f;
    status.Check(cudaEventElapsedTime(&ms, streams.begin[run], streams.end[run]),
                 "cudaEventElapsedTime");
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  result.best_ms = times.front();
  result.median_ms = times[times.size() / 2];
}

void ReadDifferences(const Case& c, const DeviceCase& device, RunsResult& result, Status& status) {
  std::vector<unsigned int> differs(result.runs);
  unsigned long long first_units[2];
  device.differs.Download(differs.data(), status);
  device.first_units.Download(first_units, status);
  result.differing_runs = std::count(differs.begin(), differs.end(), 1u);
  const int64_t units_per_element = DTypeBytes(c.problem.q_dtype) / 2;
  if (first_units[0] != ~0ull) {
    result.first_differing_element = static_cast<int64_t>(first_units[0]) / units_per_element;
  } else if (first_units[1] != ~0ull) {
    result.first_differing_element =
        c.problem.rows() * c.problem.head_dim + static_cast<int64_t>(first_units[1]) / 2;
  }
}

}  // namespace

RunsResult RunRepeatedly(const cuda::Kernel& kernel, const Case& c, const Inputs& inputs,
                         int64_t runs) {
  Status status;
  RunsResult result;
  result.runs = runs;
  DeviceCase device(c, inputs, runs, status);
  Streams streams(runs, status);
  // Uploads and memsets above use the default stream, which the streams here do not wait for.
  status.Check(cudaDeviceSynchronize(), "upload");
  if (c.misalignment != 0 && status.ok() &&
      kernel.launch(device.params, streams.main) == cudaErrorMisalignedAddress) {
    result.refused_alignment = true;
    return result;
  }
  for (int64_t run = 0; run < runs && status.ok(); ++run) {
    RunOnce(kernel, device, streams, run, status);
  }
  status.Check(cudaDeviceSynchronize(), "running the kernel");
  if (status.ok()) {
    ReadTimes(streams, result, status);
    ReadDifferences(c, device, result, status);
    std::vector<uint8_t> out(device.first_out.bytes());
    device.first_out.Download(out.data(), status);
    result.out = Load(std::move(out), c.problem.q_dtype);
    result.lse.resize(device.first_lse.bytes() / sizeof(float));
    device.first_lse.Download(result.lse.data(), status);
  }
  result.error = status.text();
  return result;
}

}  // namespace jax_fa::harness
