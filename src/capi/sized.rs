//! Structs that begin with their size, so that hosts and libraries of different versions can meet.
//!
//! A host's struct may be older and smaller (fields beyond its end get their defaults) or newer
//! and larger (what lies beyond our end must be zero: a field that we don't know is not in use).

use crate::error::{Result, fail};

/// Larger sizes are memory that nobody initialised.
const LARGEST: usize = 1 << 16;

/// A `#[repr(C)]` struct of a header.
///
/// # Safety
/// Its first field is `struct_size: usize`; every pattern of bits is a value of it; it has no
/// padding at its end, so that a field added later never lies in an older host's padding.
pub(super) unsafe trait SizedStruct: Copy {
    const NAME: &'static str;

    /// Every field as its default, `struct_size` included.
    fn defaults() -> Self;
}

fn check_size<T: SizedStruct>(size: usize) -> Result<()> {
    // Sizes of real structs are multiples of their alignment; another would cut a field in two.
    if size < size_of::<usize>() || size > LARGEST || !size.is_multiple_of(align_of::<T>()) {
        fail!(
            Argument,
            "struct_size of {} is {size}, expected {} to {LARGEST} in steps of {} (this library's \
             is {})",
            T::NAME,
            size_of::<usize>(),
            align_of::<T>(),
            size_of::<T>()
        );
    }
    Ok(())
}

fn check_pointer<T: SizedStruct>(at: *const T, name: &str) -> Result<()> {
    if at.is_null() {
        fail!(Argument, "{name} is NULL, expected a {}", T::NAME);
    }
    if !at.is_aligned() {
        fail!(Argument, "{name} is at {at:p}, expected an address aligned for {}", T::NAME);
    }
    Ok(())
}

/// Copies a host's struct.
///
/// # Safety
/// Where `from` is not NULL, it points at a `struct_size` and at as many bytes as that says.
pub(super) unsafe fn read<T: SizedStruct>(from: *const T, name: &str) -> Result<T> {
    check_pointer(from, name)?;
    // SAFETY: the caller's promise; the pointer is aligned.
    let size = unsafe { from.cast::<usize>().read() };
    check_size::<T>(size)?;
    let known = size.min(size_of::<T>());
    for i in known..size {
        // SAFETY: below `size`, which the caller promised.
        let byte = unsafe { from.cast::<u8>().add(i).read() };
        if byte != 0 {
            fail!(
                Argument,
                "byte {i} of {name} is {byte}: it lies beyond the {known} bytes of {} that this \
                 library knows, where only zeros are expected",
                T::NAME
            );
        }
    }
    let mut value = T::defaults();
    // SAFETY: `known` bytes are readable there (the promise) and writable here; any bits make a T.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut value).cast(), known) };
    Ok(value)
}

/// The size that a host wrote into a struct that is to be filled.
///
/// # Safety
/// Where `of` is not NULL, it points at a `struct_size`.
pub(super) unsafe fn size_of_output<T: SizedStruct>(of: *mut T, name: &str) -> Result<usize> {
    check_pointer(of, name)?;
    // SAFETY: the caller's promise; the pointer is aligned.
    let size = unsafe { of.cast::<usize>().read() };
    check_size::<T>(size)?;
    Ok(size)
}

/// Fills a host's struct of `size` bytes; what lies beyond our end becomes zero.
///
/// # Safety
/// Where `to` is not NULL, `size` bytes are writable there.
pub(super) unsafe fn write<T: SizedStruct>(
    to: *mut T,
    name: &str,
    size: usize,
    mut value: T,
) -> Result<()> {
    check_pointer(to, name)?;
    check_size::<T>(size)?;
    // SAFETY: the trait's promise about the first field.
    unsafe { (&raw mut value).cast::<usize>().write(size) };
    let known = size.min(size_of::<T>());
    // SAFETY: the caller's promise of `size` writable bytes; `known` are readable here.
    unsafe {
        let to = to.cast::<u8>();
        std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), to, known);
        to.add(known).write_bytes(0, size - known);
    }
    Ok(())
}
