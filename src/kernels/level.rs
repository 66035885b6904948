//! Which instruction sets the kernels may use.

use std::sync::OnceLock;

/// A set of instructions that this machine has. Values come from [`Level::best`] and
/// [`Level::available`] only, so that holding one proves that its instructions may run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Level(Tier);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub(super) enum Tier {
    Scalar,
    /// AVX2, FMA, F16C, POPCNT.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The above and AVX-512 F, BW, VL, DQ, VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// What the kernels use.
static BEST: OnceLock<Level> = OnceLock::new();

impl Level {
    pub const SCALAR: Level = Level(Tier::Scalar);

    /// The fastest level of this machine, or what [`Level::use_for_all`] chose.
    #[inline]
    pub fn best() -> Level {
        *BEST.get_or_init(|| *Level::available().last().expect("scalar is always there"))
    }

    /// Makes this the level of all kernels of the process: for benches, which measure the paths of
    /// lesser machines with it. Says whether it came before the first use of a kernel.
    pub fn use_for_all(self) -> bool {
        BEST.set(self).is_ok()
    }

    pub fn name(self) -> &'static str {
        match self.0 {
            Tier::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512 => "avx512",
        }
    }

    /// Every level of this machine, the fastest last.
    pub fn available() -> Vec<Level> {
        #[allow(unused_mut)]
        let mut levels = vec![Level::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("popcnt");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 {
                levels.push(Level(Tier::Avx2));
            }
            if avx2 && avx512 {
                levels.push(Level(Tier::Avx512));
            }
        }
        levels
    }

    #[inline]
    pub(super) fn tier(self) -> Tier {
        self.0
    }
}
