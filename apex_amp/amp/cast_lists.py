"""Which functions run in which type: data only, read when the patches are installed.

A name stands for the function in every namespace of `NAMESPACES` that has it: "softmax" covers
torch.softmax, torch.nn.functional.softmax, torch.special.softmax and Tensor.softmax. Names may be added
to and removed from the lists before `initialize`.

In-place forms need no entry: `name_` of a low-precision or promoting function matches the type of
`self`, and that of an fp32 function refuses a half `self`.
"""
from __future__ import annotations

NAMESPACES = (
    "torch", "torch.nn.functional", "torch.Tensor", "torch.linalg", "torch.special", "torch.fft", "torch.sparse",
)

# Matrix products: fast in half types, which accumulate in FP32.
LOW_PRECISION = [
    "linear", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "_convolution", "prelu",
    "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "chain_matmul", "multi_dot", "vecdot",
    "einsum", "scaled_dot_product_attention", "__matmul__", "__rmatmul__",
    "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
    "spmm", "dsmm", "hsmm", "smm", "hspmm", "sspaddmm",
]

# Low precision too; torch.nn's RNN modules call them as torch._VF.<name>.
RNN = ["rnn_tanh", "rnn_relu", "lstm", "gru"]
RNN_CELLS = ["rnn_tanh_cell", "rnn_relu_cell", "lstm_cell", "gru_cell"]

# Functions whose range or accumulation error half types do not stand, and losses.
FP32 = [
    "acos", "arccos", "asin", "arcsin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "float_power",
    "cumprod", "cumsum", "dist", "pdist", "cdist", "norm", "vector_norm", "matrix_norm", "prod", "std", "var", "sum",
    "std_mean", "var_mean", "renorm", "logsumexp", "logcumsumexp", "frobenius_norm", "nuclear_norm",
    "softmax", "softmin", "log_softmax", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "local_response_norm", "normalize",
    "cosine_similarity", "pairwise_distance",
    "grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "interpolate",
    "upsample", "upsample_nearest", "upsample_bilinear",
    "poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "nll_loss", "gaussian_nll_loss",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss", "multi_margin_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss", "binary_cross_entropy_with_logits", "ctc_loss",
    "cpu",
    # Half types have no kernels for these at all, or on CPUs.
    "complex", "polar", "view_as_complex", "quantile", "nanquantile", "histc", "histogram", "histogramdd",
    "avg_pool3d", "rrelu", "sampled_addmm", "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1",
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w", "erfcx",
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p", "log_ndtr",
    "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "ndtri",
    "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v", "shifted_chebyshev_polynomial_w",
    "spherical_bessel_j0", "vander", "zeta",
    "fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2",
    "fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn", "stft", "istft",
    "cholesky", "cholesky_ex", "cholesky_inverse", "cholesky_solve", "cond", "det", "logdet", "slogdet", "eig",
    "eigh", "eigvals", "eigvalsh", "householder_product", "inv", "inv_ex", "inverse", "ldl_factor", "ldl_factor_ex",
    "ldl_solve", "lobpcg", "lstsq", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "lu_unpack", "matrix_exp",
    "matrix_power", "matrix_rank", "orgqr", "ormqr", "geqrf", "pca_lowrank", "pinv", "pinverse", "qr", "solve",
    "solve_ex", "solve_triangular", "svd", "svd_lowrank", "svdvals", "tensorinv", "tensorsolve", "triangular_solve",
]

# Of FP32, those that convert by their own `dtype` argument, without a copy of the input.
FP32_BY_DTYPE = ["softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"]

# torch.nn.functional's versions of these only call another function of the same name, which is patched:
# patching both would cost every call twice.
FORWARDING = ["softmax", "log_softmax", "layer_norm", "group_norm", "rms_norm", "batch_norm", "instance_norm"]

# Functions of several tensors: to the widest type among them, and to FP32 where a number among the
# arguments is more than half types can hold. The kernels of these read mixed types without a copy, and write
# an in-place form's result in the type of `self`: a cast is needed only for the number, and for a 0-dim tensor.
PROMOTE_BY_KERNEL = [
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__div__",
    "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__",
    "eq", "ne", "lt", "le", "gt", "ge", "equal", "greater", "greater_equal", "less", "less_equal", "not_equal",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
]

PROMOTE = [
    "__rtruediv__", "__rdiv__", "isclose", "allclose",
    "addcdiv", "addcmul", "atan2", "arctan2", "cross", "bilinear", "dot", "vdot", "inner", "outer", "ger", "kron",
    "tensordot", "lerp", "where", "max", "min", "maximum", "minimum", "fmax", "fmin", "clamp", "clip", "hypot",
    "copysign", "nextafter", "logaddexp", "logaddexp2", "xlogy", "heaviside",
    "embedding_bag", "put", "index_put", "index_add", "index_copy", "index_reduce",
    "scatter", "scatter_add", "scatter_reduce",
    "masked_fill", "index_fill", "full_like", "new_full", "pad", "threshold", "hardtanh", "clamp_min", "clamp_max",
    "masked_scatter", "select_scatter", "slice_scatter", "diagonal_scatter", "searchsorted", "bucketize",
]

# Half inputs with FP32 statistics and weights are what their kernels are made for; half weights, predicted by a
# network, they refuse beside FP32.
PROMOTE_REST = ["batch_norm", "instance_norm"]

SEQUENCE_PROMOTE = [
    "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack", "block_diag",
    "cartesian_prod", "meshgrid",
]

BANNED = {
    "binary_cross_entropy":
        "binary_cross_entropy (torch.nn.BCELoss) got a half-precision argument; its logarithm and gradient need FP32. "
        "Use torch.nn.BCEWithLogitsLoss, which takes the logits and joins the sigmoid and the loss in one safe step; "
        "or keep the sigmoid in FP32 with amp.register_float_function(torch, 'sigmoid') before amp.initialize; "
        "or call it under amp.disable_casts().",
}

# In-place operators: as the in-place forms of the functions above.
MATCH_SELF = ["__setitem__"]
FP32_IN_PLACE = ["__ipow__"]

# These write a number itself; one that a half `self` cannot hold is replaced by the type's limit.
FILL_IN_PLACE = [
    "fill_", "fill_diagonal_", "masked_fill_", "index_fill_", "scatter_", "clamp_", "clamp_min_", "clamp_max_", "clip_",
    "threshold_", "hardtanh_",
]

# Tensor methods that hand out the tensor's memory: writes through it move no version counter.
UNTRACKED_WRITE = ["numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "set_"]
