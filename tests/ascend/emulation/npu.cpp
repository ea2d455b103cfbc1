// An Ascend NPU that is not there: torch's PrivateUse1 device over memory of the host.
//
// Operators of torch run on aliases: host tensors over the same bytes. Nothing is copied, so views,
// results in place and what an operator must not share are as they are on a device. Work is done
// when the call returns; copies to pinned memory of the host are not: they arrive when somebody
// waits for them, and until then there are other bytes.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "races.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 16;
constexpr int64_t GRAIN = 512, MARGIN = 32;  // of the real caching allocator, in bytes
constexpr int UNARRIVED = 0xA5;

// ---------------------------------------------------------------- what is counted

struct Counters {
  std::atomic<int64_t> to_host{0}, to_host_late{0}, to_device{0}, waits{0}, operators{0};
};
Counters counters;
int device_count = 1;
thread_local int current = 0;
thread_local c10::StreamId stream_of[MOST_DEVICES] = {};
std::atomic<int64_t> next_stream{1};
std::atomic<bool> is_capturing{false};

void refuse_in_capture(const char* what) {
  TORCH_CHECK(!is_capturing, what, " is not allowed while a graph is captured [107027]");
}

void count_wait(const char* what) {
  refuse_in_capture(what);
  counters.waits++;
}

// ---------------------------------------------------------------- memory

struct Bank {
  std::atomic<int64_t> used{0}, limit{int64_t(1) << 30};
};
Bank banks[MOST_DEVICES];

void reserve(int device, int64_t bytes) {
  Bank& bank = banks[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, bytes <= 0 || bank.used + bytes <= bank.limit, "NPU out of memory: ", bytes,
      " bytes were asked for, npu:", device, " has ", bank.limit.load(), " and ", bank.used.load(),
      " of them are in use");
  bank.used += bytes;
}

struct Block {
  int device;
  int64_t bytes;
  c10::DataPtr memory;
  c10::Storage adopted;  // of a result that an operator has allocated itself
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  races::forget(block->adopted ? block->adopted.data() : block->memory.get());
  reserve(block->device, -block->bytes);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const int64_t bytes = size ? (int64_t(size) + MARGIN + GRAIN - 1) / GRAIN * GRAIN : 0;
    reserve(current, bytes);
    auto memory = c10::GetCPUAllocator()->allocate(size);
    void* address = memory.get();
    auto* block = new Block{current, bytes, std::move(memory), {}};
    return {address, block, &free_block, c10::Device(NPU, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(NPU, &device_allocator)

std::mutex pinned_lock;
std::unordered_set<const void*> pinned;

void free_pinned(void* context) {
  auto* memory = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned.erase(memory->get());
  }
  delete memory;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(std::max<size_t>(size, 1)));
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned.insert(memory->get());
    return {memory->get(), memory, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};
PinnedAllocator pinned_allocator;

// ---------------------------------------------------------------- copies that arrive later

struct LateCopy {
  int64_t number;
  at::Tensor bytes, to;
};
std::mutex late_lock;
std::deque<LateCopy> late;
int64_t launched = 0;

void send_late(at::Tensor bytes, at::Tensor to) {
  std::memset(to.mutable_data_ptr(), UNARRIVED, to.nbytes());
  std::lock_guard<std::mutex> hold(late_lock);
  late.push_back({++launched, std::move(bytes), std::move(to)});
}

int64_t launched_so_far() {
  std::lock_guard<std::mutex> hold(late_lock);
  return launched;
}

void deliver(int64_t up_to) {
  // Let go of behind the lock: the last owner of a tensor waits for the interpreter, which a thread may
  // have that waits for the lock.
  std::deque<LateCopy> arrived;
  std::lock_guard<std::mutex> hold(late_lock);
  for (; !late.empty() && late.front().number <= up_to; late.pop_front()) {
    LateCopy& copy = arrived.emplace_back(std::move(late.front()));
    std::memcpy(copy.to.mutable_data_ptr(), copy.bytes.data_ptr(), copy.to.nbytes());
  }
}

void wait_for_all(const char* what) {
  count_wait(what);
  deliver(launched_so_far());
}

// ---------------------------------------------------------------- devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device device) { return device.has_index() ? device.index() : current; }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(NPU, index(device)), id);
  }
  c10::DeviceType type() const override { return NPU; }
  c10::Device getDevice() const override { return c10::Device(NPU, current); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index(device) < device_count, "npu:", index(device), " does not exist: there are ",
                device_count, " devices");
    current = index(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = index(device); }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, stream_of[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device, next_stream++);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    stream_of[next.device_index()] = next.id();
    return before;
  }
  struct Event {
    int64_t copies = 0;  // that were launched before it
    races::Clock clock;
  };
  static races::Key key(const c10::Stream& stream) {
    return races::key_of(stream.device_index(), stream.id());
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {launched_so_far(), races::recorded(key(stream))};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) races::wait_for(key(stream), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) synchronise(*static_cast<Event*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    count_wait("waiting for an event");
    if (event) synchronise(*static_cast<Event*>(event));
  }
  static void synchronise(const Event& event) {
    deliver(event.copies);
    races::wait_for(races::HOST, event.clock);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for_all("waiting for a stream");
    races::host_waits_for(key(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    wait_for_all("waiting for the device");
    races::host_waits_for_all();
  }
  bool isStreamCapturing(const c10::Stream&) const override { return is_capturing; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> hold(pinned_lock);
    return pinned.count(address) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice(c10::Device(NPU, device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(c10::Device(NPU, device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto memory = device_allocator.allocate(size);
    std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---------------------------------------------------------------- host tensors over device memory

bool is_on_device(const at::Tensor& x) { return x.defined() && x.device().type() == NPU; }

// Gives `made` the sizes of `like`.
at::Tensor shaped(at::Tensor made, const at::Tensor& like) {
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// The aliases that one operator works on.
class Aliases {
 public:
  int device = -1;

  at::Tensor host(const at::Tensor& x) {
    device = x.device().index();
    auto* mine = x.storage().unsafeGetStorageImpl();
    auto found = host_storage_.find(mine);
    if (found == host_storage_.end()) {
      c10::DataPtr memory(mine->mutable_data(), new c10::Storage(x.storage()), &drop_storage,
                          c10::Device(c10::kCPU));
      auto storage = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), mine->nbytes(), std::move(memory),
          c10::GetCPUAllocator(), true);
      device_storage_[storage.get()] = {x.storage(), mine->mutable_data()};
      found = host_storage_.emplace(mine, c10::Storage(std::move(storage))).first;
    }
    auto alias = shaped(
        at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype()),
        x);
    made_.emplace_back(x, alias);
    return alias;
  }

  at::Tensor device_tensor(const at::Tensor& x) {
    if (!x.defined() || !x.device().is_cpu()) return x;
    for (auto& [original, alias] : made_)
      if (alias.is_same(x)) return original;  // what was changed in place stays what it was
    TORCH_CHECK(x.scalar_type() != at::kDouble, "the device has no float64");
    auto storage = storage_of(x);
    // A view belongs to the mode that its base was made in.
    for (auto& [original, alias] : made_)
      if (original.storage().is_alias_of(storage))
        return shaped(
            at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage),
                                                     original.key_set(), x.dtype()),
            x);
    return shaped(
        at::detail::make_tensor<c10::TensorImpl>(
            std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), x.dtype()),
        x);
  }

  // Enters what resize_ and set_ have done to aliases.
  void settle() {
    for (auto& [original, alias] : made_) {
      auto* impl = original.unsafeGetTensorImpl();
      auto* storage = alias.storage().unsafeGetStorageImpl();
      auto found = device_storage_.find(storage);
      const bool has_moved = found == device_storage_.end() || storage->data() != found->second.second;
      if (has_moved) impl->set_storage_keep_dtype(storage_of(alias));
      if (has_moved || original.sizes() != alias.sizes() || original.strides() != alias.strides() ||
          original.storage_offset() != alias.storage_offset())
        impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

 private:
  c10::Storage storage_of(const at::Tensor& x) {
    auto* theirs = x.storage().unsafeGetStorageImpl();
    auto found = device_storage_.find(theirs);
    if (found != device_storage_.end() && theirs->data() == found->second.second)
      return found->second.first;
    const int where = device < 0 ? current : device;
    const auto bytes = int64_t(theirs->nbytes());
    reserve(where, bytes);
    auto* block = new Block{where, bytes, {}, x.storage()};
    c10::DataPtr memory(theirs->mutable_data(), block, &free_block, c10::Device(NPU, where));
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), theirs->nbytes(), std::move(memory),
        &device_allocator, true));
    device_storage_[theirs] = {storage, theirs->mutable_data()};
    return storage;
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storage_;
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, void*>> device_storage_;
  std::vector<std::pair<at::Tensor, at::Tensor>> made_;
};

// ---------------------------------------------------------------- what work is ordered

races::Key stream_now(int device) { return races::key_of(device, stream_of[device]); }

// One piece of work on the stream at hand, and the memory that it uses.
class Work {
 public:
  Work(std::string name, int device) : name_(std::move(name)), device_(device) {}

  void uses(const at::Tensor& x, bool writes) {
    if (is_on_device(x) && x.has_storage()) used_.emplace_back(x.storage().data(), writes);
  }
  void launch() {
    std::lock_guard<std::mutex> hold(races::watch.lock);
    if (!races::watch.is_on || device_ < 0) return;
    const auto stream = stream_now(device_);
    const auto time = races::launch(stream);
    for (const auto& [place, writes] : used_) races::touch(place, stream, time, writes, name_);
    used_.clear();
  }

 private:
  std::string name_;
  int device_;
  std::vector<std::pair<const void*, bool>> used_;
};

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

// ---------------------------------------------------------------- every operator without its own

const std::unordered_set<std::string> SIZE_FROM_DATA = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::bincount"};

bool takes_host_indices(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
}

void run_on_aliases(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  counters.operators++;
  if (SIZE_FROM_DATA.count(name)) wait_for_all(name.c_str());
  Aliases aliases;
  std::vector<std::pair<at::Tensor, bool>> used;
  const bool looks_on = races::watch.is_on && !is_view(schema);
  bool has_host = false;
  const auto take = [&](const at::Tensor& x) {
    if (is_on_device(x)) {
      TORCH_CHECK(aliases.device < 0 || aliases.device == x.device().index(), name,
                  ": tensors are on npu:", aliases.device, " and npu:", int(x.device().index()));
      return aliases.host(x);
    }
    has_host = has_host || (x.defined() && x.dim() > 0);
    return x;
  };
  const auto take_index = [&](const at::Tensor& x) {
    if (x.scalar_type() == at::kBool || x.scalar_type() == at::kByte) wait_for_all(name.c_str());
    if (is_on_device(x)) return aliases.host(x);
    refuse_in_capture("an index on the host");
    counters.to_device++;
    return x;
  };
  for (size_t at = stack->size() - schema.arguments().size(); at < stack->size(); ++at) {
    auto& argument = (*stack)[at];
    if (looks_on) {
      const auto& declared = schema.arguments()[at - (stack->size() - schema.arguments().size())];
      const bool writes = declared.alias_info() && declared.alias_info()->isWrite();
      if (argument.isTensor()) used.emplace_back(argument.toTensor(), writes);
      if (argument.isTensorList())
        for (const at::Tensor& x : argument.toTensorVector()) used.emplace_back(x, writes);
      if (argument.isOptionalTensorList())
        for (const std::optional<at::Tensor>& x : argument.toOptionalTensorVector())
          if (x) used.emplace_back(*x, false);
    }
    if (argument.isTensor()) {
      argument = take(argument.toTensor());
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : argument.toTensorVector()) list.push_back(take(x));
      argument = list;
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& x : argument.toOptionalTensorVector()) {
        if (!x || !x->defined()) list.push_back(std::nullopt);
        else list.push_back(takes_host_indices(name) ? take_index(*x) : take(*x));
      }
      argument = list;
    } else if (argument.isDevice() && argument.toDevice().type() == NPU) {
      aliases.device = Guard::index(argument.toDevice());
      argument = c10::Device(c10::kCPU);
    }
  }
  TORCH_CHECK(!has_host || aliases.device < 0, name,
              ": expected all tensors on one device; one is on npu:", aliases.device,
              " and another on the host");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  aliases.settle();
  for (size_t at = stack->size() - schema.returns().size(); at < stack->size(); ++at) {
    auto& result = (*stack)[at];
    if (result.isTensor()) {
      result = aliases.device_tensor(result.toTensor());
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : result.toTensorVector()) list.push_back(aliases.device_tensor(x));
      result = list;
    }
    if (looks_on && result.isTensor()) used.emplace_back(result.toTensor(), true);
  }
  if (!looks_on) return;
  Work work(name, aliases.device);
  for (const auto& [x, writes] : used) work.uses(x, writes);
  work.launch();
  if (SIZE_FROM_DATA.count(name)) races::host_waits_for(stream_now(aliases.device));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_aliases>());
}

// ---------------------------------------------------------------- operators of its own

// float64 becomes float32, as torch_npu does.
at::ScalarType kept(std::optional<at::ScalarType> dtype) {
  const auto asked = c10::dtype_or_default(dtype);
  return asked == at::kDouble ? at::kFloat : asked;
}

c10::Device on(std::optional<at::Device> device) {
  return c10::Device(NPU, device && device->has_index() ? device->index() : current);
}

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> is_pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!is_pinned.value_or(false), "memory of the device cannot be pinned");
  c10::DeviceGuard guard(on(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, KEYS,
                                   kept(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(on(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &device_allocator, KEYS,
                                           kept(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool is_late) {
  Aliases aliases;
  const bool from_device = is_on_device(from), to_device = is_on_device(to);
  const int device = (from_device ? from : to).device().index();
  Work work(from_device ? (to_device ? "a copy" : "a copy to the host") : "a copy from the host",
            device);
  work.uses(from, false);
  work.uses(to, true);
  work.launch();
  if (from_device && !to_device) {
    refuse_in_capture("a copy to the host");
    counters.to_host++;
    if (is_late && to.is_pinned() && to.is_contiguous()) {
      counters.to_host_late++;
      send_late(aliases.host(from).to(to.scalar_type()).clone().reshape(to.sizes()).contiguous(),
                to);
      return to;
    }
    wait_for_all("a copy to the host");
    races::host_waits_for(stream_now(device));
  }
  if (!from_device && to_device) {
    counters.to_device++;
    if (!is_late || !from.is_pinned()) refuse_in_capture("a copy from memory that is not pinned");
  }
  if (!from_device && !(is_late && from.is_pinned())) races::host_waits_for(stream_now(device));
  const auto source = from_device ? aliases.host(from) : from;
  (to_device ? aliases.host(to) : to).copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& x) {
  wait_for_all("reading a number of the device");
  Work work("reading a number", x.device().index());
  work.uses(x, false);
  work.launch();
  races::host_waits_for(stream_now(x.device().index()));
  counters.to_host++;
  Aliases aliases;
  return aliases.host(x).item();
}

at::Tensor as_strided(const at::Tensor& x, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(x.storage()), x.key_set(), x.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(x.storage_offset()));
  return view;
}

at::Tensor& set_storage(at::Tensor& x, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> steps(stride.begin(), stride.end());
  if (steps.size() != size.size()) {
    steps.assign(size.size(), 1);
    for (int i = int(size.size()) - 2; i >= 0; --i) steps[i] = steps[i + 1] * size[i + 1];
  }
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, steps, offset);
  return x;
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) {
  return set_storage(x, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &as_strided);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
}

at::Tensor host_alias(const at::Tensor& x, bool writes) {
  TORCH_CHECK(is_on_device(x), "a tensor of the device was expected");
  Work work("an operator of the NPU", x.device().index());
  work.uses(x, writes);
  work.launch();
  return Aliases().host(x);
}

at::Tensor device_alias(const at::Tensor& x, int device) {
  Aliases aliases;
  aliases.device = device;
  const auto made = aliases.device_tensor(x);
  Work work("an operator of the NPU", device);
  work.uses(made, true);
  work.launch();
  return made;
}

std::map<std::string, int64_t> counted() {
  return {{"to_host", counters.to_host},
          {"to_host_late", counters.to_host_late},
          {"to_device", counters.to_device},
          {"waits", counters.waits},
          {"operators", counters.operators}};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("set_device_count", [](int count) { device_count = std::min(count, MOST_DEVICES); });
  m.def("device_count", [] { return device_count; });
  m.def("current_device", [] { return current; });
  m.def("set_device", [](int device) { Guard().setDevice(c10::Device(NPU, device)); });
  m.def("set_limit", [](int device, int64_t bytes) { banks[device].limit = bytes; });
  m.def("limit_bytes", [](int device) { return banks[device].limit.load(); });
  m.def("used_bytes", [](int device) { return banks[device].used.load(); });
  m.def("set_capturing", [](bool value) { is_capturing = value; });
  m.def("counters", &counted);
  m.def("host_alias", &host_alias, "the same bytes as a tensor of the host", pybind11::arg("x"),
        pybind11::arg("writes") = false);
  m.def("watch_races", &races::start);
  m.def("races", &races::found);
  m.def("device_alias", &device_alias, "the bytes of a host tensor as one of the device");
}
