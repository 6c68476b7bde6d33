"""The fields of onnx.proto that are read, and the element types. Source: onnx/onnx.proto."""

from __future__ import annotations

from weights.protobuf import BYTES, FLOAT, INT, PACKED, TEXT, Schema

ONE, MANY = False, True

SCHEMA: Schema = {
    "Model": {
        1: ("ir_version", INT, ONE), 2: ("producer_name", TEXT, ONE),
        3: ("producer_version", TEXT, ONE), 7: ("graph", "Graph", ONE),
        8: ("opset_import", "Opset", MANY), 14: ("metadata", "Pair", MANY),
        25: ("functions", "Function", MANY),
    },
    "Opset": {1: ("domain", TEXT, ONE), 2: ("version", INT, ONE)},
    "Pair": {1: ("key", TEXT, ONE), 2: ("value", TEXT, ONE)},
    "Graph": {
        1: ("node", "Node", MANY), 2: ("name", TEXT, ONE), 5: ("initializer", "Tensor", MANY),
        11: ("input", "Value", MANY), 12: ("output", "Value", MANY),
        15: ("sparse_initializer", "Sparse", MANY),
    },
    "Function": {
        1: ("name", TEXT, ONE), 4: ("input", TEXT, MANY), 5: ("output", TEXT, MANY),
        6: ("attribute", TEXT, MANY), 7: ("node", "Node", MANY),
        9: ("opset_import", "Opset", MANY), 10: ("domain", TEXT, ONE),
        11: ("attribute_proto", "Attribute", MANY), 13: ("overload", TEXT, ONE),
    },
    "Node": {
        1: ("input", TEXT, MANY), 2: ("output", TEXT, MANY), 3: ("name", TEXT, ONE),
        4: ("op_type", TEXT, ONE), 5: ("attribute", "Attribute", MANY),
        7: ("domain", TEXT, ONE), 8: ("overload", TEXT, ONE),
    },
    "Attribute": {
        1: ("name", TEXT, ONE), 2: ("f", FLOAT, ONE), 3: ("i", INT, ONE), 4: ("s", BYTES, ONE),
        5: ("t", "Tensor", ONE), 6: ("g", "Graph", ONE), 7: ("floats", FLOAT, MANY),
        8: ("ints", INT, MANY), 9: ("strings", BYTES, MANY), 10: ("tensors", "Tensor", MANY),
        11: ("graphs", "Graph", MANY), 14: ("tp", "Type", ONE), 20: ("type", INT, ONE),
        21: ("ref_attr_name", TEXT, ONE), 22: ("sparse_tensor", "Sparse", ONE),
    },
    "Tensor": {
        1: ("dims", INT, MANY), 2: ("data_type", INT, ONE), 4: ("float_data", PACKED, ONE),
        5: ("int32_data", PACKED, ONE), 6: ("string_data", BYTES, MANY),
        7: ("int64_data", PACKED, ONE), 8: ("name", TEXT, ONE), 9: ("raw_data", BYTES, ONE),
        10: ("double_data", PACKED, ONE), 11: ("uint64_data", PACKED, ONE),
        13: ("external_data", "Pair", MANY), 14: ("data_location", INT, ONE),
    },
    "Sparse": {3: ("dims", INT, MANY)},
    "Value": {1: ("name", TEXT, ONE), 2: ("type", "Type", ONE)},
    "Type": {
        1: ("tensor", "TensorType", ONE), 4: ("sequence", "Inner", ONE),
        5: ("map", "TensorType", ONE), 8: ("sparse_tensor", "TensorType", ONE),
        9: ("optional", "Inner", ONE),
    },
    "Inner": {1: ("elem_type", "Type", ONE)},
    "TensorType": {1: ("elem_type", INT, ONE), 2: ("shape", "Shape", ONE)},
    "Shape": {1: ("dim", "Dim", MANY)},
    "Dim": {1: ("dim_value", INT, ONE), 2: ("dim_param", TEXT, ONE)},
}  # fmt: skip

# Which field of an attribute its type says to read.
ATTRIBUTES = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings",
              9: "tensors", 10: "graphs", 13: "tp"}  # fmt: skip

# Number -> name as NumPy (or the package ml_dtypes) has it, and the bits of an element.
TYPES = {
    1: ("float32", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16),
    6: ("int32", 32), 7: ("int64", 64), 8: ("str", 0), 9: ("bool", 8), 10: ("float16", 16),
    11: ("float64", 64), 12: ("uint32", 32), 13: ("uint64", 64), 14: ("complex64", 64),
    15: ("complex128", 128), 16: ("bfloat16", 16), 17: ("float8_e4m3fn", 8),
    18: ("float8_e4m3fnuz", 8), 19: ("float8_e5m2", 8), 20: ("float8_e5m2fnuz", 8),
    21: ("uint4", 4), 22: ("int4", 4), 23: ("float4_e2m1fn", 4), 24: ("float8_e8m0fnu", 8),
    25: ("uint2", 2), 26: ("int2", 2),
}  # fmt: skip
NAMES = {number: name for number, (name, _) in TYPES.items()}

# The field that holds elements which aren't raw, and the type of one there: (field, NumPy's code).
FIELDS = {
    **dict.fromkeys(("float32", "complex64"), ("float_data", "<f4")),
    **dict.fromkeys(("float64", "complex128"), ("double_data", "<f8")),
    **dict.fromkeys(("uint32", "uint64"), ("uint64_data", "")),
    "int64": ("int64_data", ""),
}
