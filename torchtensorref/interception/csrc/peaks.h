// The bytes that a composite operator takes at its peak, as one: operators/peaks.py says why and how; a test compares them.
#pragma once

#include "plan.h"

namespace ttr {
constexpr int64_t kUnknown = -1;

inline int64_t nbytes_of(const at::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.itemsize()); }

inline int64_t peak_of_linear(const at::Tensor& x, const at::Tensor& weight, bool has_bias) {
  const auto sizes = x.sizes(), strides = x.strides();
  if (x.is_contiguous()) {
    if (has_bias) return 0;
    size_t i = 1;
    while (i < sizes.size() && strides[i - 1] == strides[i] * sizes[i]) ++i;
    if (i >= sizes.size()) return 0;
  }
  if (!x.dim() || !weight.dim() || (x.dim() > 2 && (x.requires_grad() || weight.requires_grad())) || !x.size(-1)) return kUnknown;
  return nbytes_of(x) + nbytes_of(x) / x.size(-1) * weight.size(0);
}

inline int64_t peak_of_matmul(const at::Tensor& a, const at::Tensor& b) {
  if (a.dim() == 2 && b.dim() == 2) return 0;
  if (a.dim() < 3 || b.dim() != a.dim() || !a.size(-1) || a.sizes().slice(0, a.dim() - 2) != b.sizes().slice(0, b.dim() - 2)) return kUnknown;
  return nbytes_of(a) + nbytes_of(b) + nbytes_of(a) / a.size(-1) * b.size(-1);
}

inline int64_t peak_of_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const IValue& mask, bool drops) {
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4 || !key.numel() || (mask.isTensor() && mask.toTensor().requires_grad())) return kUnknown;
  auto most = [&](int64_t i) { return std::max({query.size(i), key.size(i), value.size(i)}); };
  auto fits = [](const at::Tensor& x) { return (x.dim() == 2 || x.dim() == 4) && x.stride(-1) == 1; };
  const bool is_even = key.sizes() == value.sizes() && query.size(0) == key.size(0) && query.size(3) == key.size(3) && key.size(1) <= query.size(1);
  const bool may_fuse = !drops && at::globalContext().userEnabledFlashSDP();
  const bool is_fused = may_fuse && is_even && key.size(1) >= std::min<int64_t>(query.size(1), 2) && fits(query) && fits(key) && fits(value) && (mask.isNone() || fits(mask.toTensor()));
  const int64_t rows = query.size(2), weights = rows * key.size(2), operands = (rows + 2 * key.size(2)) * most(3);
  const int64_t each = rows * value.size(3) + 3 * weights + operands + (is_fused ? 0 : 2 * weights + 2 * operands);
  return most(0) * most(1) * each * std::max<int64_t>(query.itemsize(), 4);
}

// `arguments` are the operator's, as torch passes them.
inline int64_t peak_nbytes(Peak kind, const IValue* arguments) {
  auto tensor = [&](size_t i) -> const at::Tensor& { return arguments[i].toTensor(); };
  switch (kind) {
    case Peak::kNotWhole: break;
    case Peak::kLinear: return peak_of_linear(tensor(0), tensor(1), arguments[2].isTensor());
    case Peak::kMatmul: return peak_of_matmul(tensor(0), tensor(1));
    case Peak::kAttention: return peak_of_attention(tensor(0), tensor(1), tensor(2), arguments[3], arguments[4].isDouble() && arguments[4].toDouble() != 0);
    case Peak::kNorm: return 3 * tensor(0).numel() * std::max<int64_t>(tensor(0).itemsize(), 4);
  }
  return kUnknown;
}

// The same of a call; the rules know nothing of other classes and layouts.
inline int64_t peak_nbytes(const Plan& plan, const IValue* arguments) {
  return plan.each_tensor(arguments, [](const at::Tensor& tensor, bool) { return !tensor.defined() || is_ref(tensor); }) ? peak_nbytes(plan.peak, arguments) : kUnknown;
}
}  // namespace ttr
