//! Numbers of small float tensors.

use half::f16;

use super::preflight::{TensorInfo, quoted};
use super::tensor_type::{F16, F32};
use crate::error::{Result, fail};

/// All values of an F32 or F16 tensor of the given shape (fastest dimension first).
pub(crate) fn read_floats(tensor: &TensorInfo, shape: &[u64]) -> Result<Vec<f32>> {
    let name = quoted(tensor.name);
    let mut dims = [1; 4];
    for (dim, &expected) in dims.iter_mut().zip(shape) {
        *dim = expected;
    }
    if shape.len() > 4 || tensor.dims != dims {
        fail!(Format, "tensor {name} has shape {:?}, expected {dims:?}", tensor.dims);
    }
    let mut values = Vec::new();
    // The data lies inside the file, which bounds what is reserved here.
    values.try_reserve_exact(tensor.data.len() / tensor.tensor_type.bytes as usize)?;
    match tensor.tensor_type.number {
        F32 => {
            let (numbers, _) = tensor.data.as_chunks::<4>();
            values.extend(numbers.iter().map(|&bytes| f32::from_le_bytes(bytes)));
        }
        F16 => {
            let (numbers, _) = tensor.data.as_chunks::<2>();
            values.extend(numbers.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()));
        }
        _ => fail!(
            Unsupported,
            "tensor {name} is of type {}, expected F32 or F16",
            tensor.tensor_type.name
        ),
    }
    if let Some(index) = values.iter().position(|value| !value.is_finite()) {
        fail!(Format, "tensor {name} holds {} at {index}, expected finite numbers", values[index]);
    }
    Ok(values)
}
