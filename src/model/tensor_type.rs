//! The storage types of GGUF tensors and what a block of each takes.
//!
//! Numbers, block lengths and sizes are those of `ggml_type` and ggml's `block_*` structs. A type
//! that is not here is refused: without its size nobody can tell whether a tensor fits its file.

/// How a tensor type is laid out: blocks of `elements` values in `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorType {
    pub number: u32,
    pub name: &'static str,
    pub elements: u64,
    pub bytes: u64,
}

pub(crate) const F32: u32 = 0;
pub(crate) const F16: u32 = 1;

const fn plain(number: u32, name: &'static str, bytes: u64) -> TensorType {
    TensorType { number, name, elements: 1, bytes }
}

const fn blocks(number: u32, name: &'static str, elements: u64, bytes: u64) -> TensorType {
    TensorType { number, name, elements, bytes }
}

/// 4, 5, 31 to 33 and 36 to 38 were withdrawn from the format.
const TENSOR_TYPES: [TensorType; 35] = [
    plain(F32, "F32", 4),
    plain(F16, "F16", 2),
    blocks(2, "Q4_0", 32, 18),
    blocks(3, "Q4_1", 32, 20),
    blocks(6, "Q5_0", 32, 22),
    blocks(7, "Q5_1", 32, 24),
    blocks(8, "Q8_0", 32, 34),
    blocks(9, "Q8_1", 32, 36),
    blocks(10, "Q2_K", 256, 84),
    blocks(11, "Q3_K", 256, 110),
    blocks(12, "Q4_K", 256, 144),
    blocks(13, "Q5_K", 256, 176),
    blocks(14, "Q6_K", 256, 210),
    blocks(15, "Q8_K", 256, 292),
    blocks(16, "IQ2_XXS", 256, 66),
    blocks(17, "IQ2_XS", 256, 74),
    blocks(18, "IQ3_XXS", 256, 98),
    blocks(19, "IQ1_S", 256, 50),
    blocks(20, "IQ4_NL", 32, 18),
    blocks(21, "IQ3_S", 256, 110),
    blocks(22, "IQ2_S", 256, 82),
    blocks(23, "IQ4_XS", 256, 136),
    plain(24, "I8", 1),
    plain(25, "I16", 2),
    plain(26, "I32", 4),
    plain(27, "I64", 8),
    plain(28, "F64", 8),
    blocks(29, "IQ1_M", 256, 56),
    plain(30, "BF16", 2),
    blocks(34, "TQ1_0", 256, 54),
    blocks(35, "TQ2_0", 256, 66),
    blocks(39, "MXFP4", 32, 17),
    blocks(40, "NVFP4", 64, 36),
    blocks(41, "Q1_0", 128, 18),
    blocks(42, "Q2_0", 64, 18),
];

impl TensorType {
    pub fn from_number(number: u32) -> Option<Self> {
        TENSOR_TYPES.iter().copied().find(|t| t.number == number)
    }

    /// Bytes of a tensor of this type, or `None` where its rows are no whole blocks or the product
    /// does not fit.
    pub fn tensor_bytes(&self, dims: &[u64; 4]) -> Option<u64> {
        if !dims[0].is_multiple_of(self.elements) {
            return None;
        }
        dims[1..]
            .iter()
            .try_fold((dims[0] / self.elements).checked_mul(self.bytes)?, |n, &d| n.checked_mul(d))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_rise_and_are_found_again() {
        assert!(TENSOR_TYPES.windows(2).all(|pair| pair[0].number < pair[1].number));
        for t in TENSOR_TYPES {
            assert_eq!(TensorType::from_number(t.number), Some(t));
        }
        for withdrawn in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(TensorType::from_number(withdrawn), None);
        }
    }

    #[test]
    fn a_tensor_takes_whole_blocks() {
        let q4_k = TensorType::from_number(12).unwrap();
        assert_eq!(q4_k.tensor_bytes(&[512, 3, 2, 1]), Some(2 * 144 * 3 * 2));
        assert_eq!(q4_k.tensor_bytes(&[128, 3, 2, 1]), None);
        assert_eq!(q4_k.tensor_bytes(&[1 << 62, 1 << 62, 1, 1]), None);
    }
}
