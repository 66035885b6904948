use super::*;
use crate::error::Status;
use crate::model::gguf_writer::GgufWriter;
use crate::model::testing::model_keys;

fn sample() -> GgufWriter {
    let mut writer = model_keys("llama");
    writer.u32_array("llama.attention.head_count_kv_extra", &[1, 2]);
    writer.f32_tensor("rope_freqs.weight", &[4], &[1.0, 1.0, 2.0, 4.0]);
    writer.f32_tensor("blk.0.weight", &[4, 2], &[0.5; 8]);
    writer
}

#[track_caller]
fn assert_refused(file: &[u8], status: Status, message: &str) {
    let error = Header::scan(file).unwrap_err();
    assert_eq!(error.status, status, "{error}");
    assert!(error.message.contains(message), "{error}, expected {message}");
    assert!(!error.message.contains('\n'), "{error}");
}

/// The file with the first occurrence of some bytes replaced by as many others.
fn patched(file: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = file.windows(from.len()).position(|window| window == from).unwrap();
    [&file[..at], to, &file[at + to.len()..]].concat()
}

#[test]
fn finds_entries_and_tensors_where_they_are() {
    let file = sample().finish();
    let header = Header::scan(&file).unwrap();
    assert_eq!(header.entries.len(), 7);
    assert_eq!(header.entries[0].key, "general.architecture");
    assert_eq!(header.entries[6].n_values, 2);
    let tensor = header.tensor("blk.0.weight").unwrap();
    assert_eq!(tensor.dims, [4, 2, 1, 1]);
    assert_eq!(tensor.data, 0.5f32.to_le_bytes().repeat(8));
    assert!(header.tensor("blk.1.weight").is_none());
}

#[test]
fn refuses_every_truncation() {
    let file = sample().finish();
    for length in 0..file.len() {
        assert!(Header::scan(&file[..length]).is_err(), "{length} bytes of {}", file.len());
    }
}

#[test]
fn reads_version_2_and_refuses_others() {
    let file = sample().finish();
    let version = |version: u32| [&file[..4], &version.to_le_bytes(), &file[8..]].concat();
    assert!(Header::scan(&version(2)).is_ok());
    assert_refused(&version(1), Status::Unsupported, "version 1");
    assert_refused(&version(4), Status::Format, "version is 4");
    assert_refused(&version(0), Status::Format, "version is 0");
}

#[test]
fn names_a_big_endian_file() {
    let file = sample().finish();
    let big = [&file[..4], &3u32.to_be_bytes(), &file[8..]].concat();
    assert_refused(&big, Status::Unsupported, "big-endian");
    let reversed = [b"FUGG", &file[4..]].concat();
    assert_refused(&reversed, Status::Unsupported, "big-endian");
}

#[test]
fn refuses_another_kind_of_file() {
    assert_refused(b"\x7fELF\x02\x01\x01", Status::Format, "no GGUF file");
}

#[test]
fn refuses_counts_beyond_the_file() {
    let file = sample().finish();
    for count in [1 << 12, 1 << 40, u64::MAX] {
        let tensors = [&file[..8], &u64::to_le_bytes(count), &file[16..]].concat();
        assert_refused(&tensors, Status::Format, "announces");
        let entries = [&file[..16], &u64::to_le_bytes(count), &file[24..]].concat();
        assert_refused(&entries, Status::Format, "announces");
    }
}

#[test]
fn refuses_strings_and_arrays_beyond_the_file() {
    for length in [1u64 << 20, 1 << 60, u64::MAX] {
        let mut writer = GgufWriter::new();
        writer.entry("text", value_type::STRING, &length.to_le_bytes());
        assert_refused(&writer.finish(), Status::Format, "the value of \"text\"");
        for element in [value_type::U8, value_type::F64, value_type::STRING] {
            let mut writer = GgufWriter::new();
            let value = [&element.to_le_bytes()[..], &length.to_le_bytes()].concat();
            writer.entry("list", value_type::ARRAY, &value);
            assert_refused(&writer.finish(), Status::Format, "the value of \"list\"");
        }
    }
}

#[test]
fn refuses_unknown_value_types_and_nested_arrays() {
    let mut writer = GgufWriter::new();
    writer.entry("odd", 13, &[0; 8]);
    assert_refused(&writer.finish(), Status::Format, "type 13");
    let mut writer = GgufWriter::new();
    let value = [&value_type::ARRAY.to_le_bytes()[..], &[0; 8]].concat();
    writer.entry("nested", value_type::ARRAY, &value);
    assert_refused(&writer.finish(), Status::Format, "elements of type 9");
}

#[test]
fn refuses_an_alignment_that_is_no_power_of_two() {
    for alignment in [0, 3, 48] {
        let file = GgufWriter::new().u32("general.alignment", alignment).finish();
        assert_refused(&file, Status::Format, "power of two");
    }
    let file = GgufWriter::new().entry("general.alignment", value_type::U64, &[0; 8]).finish();
    assert_refused(&file, Status::Format, "value type 10");
}

#[test]
fn refuses_duplicates() {
    let file = GgufWriter::new().u32("key", 1).u32("key", 2).finish();
    assert_refused(&file, Status::Format, "\"key\" stands twice");
    let mut writer = GgufWriter::new();
    writer.f32_tensor("weight", &[1], &[0.0]);
    writer.f32_tensor("weight", &[1], &[0.0]);
    assert_refused(&writer.finish(), Status::Format, "\"weight\" stands twice");
}

#[test]
fn refuses_names_that_are_empty_long_or_not_text() {
    assert_refused(&GgufWriter::new().u32("", 1).finish(), Status::Format, "0 bytes");
    let mut writer = GgufWriter::new();
    writer.f32_tensor(&"n".repeat(64), &[1], &[0.0]);
    assert_refused(&writer.finish(), Status::Format, "64 bytes");
    let file = patched(&sample().finish(), b"general.arch", b"general.\xff\xffch");
    assert_refused(&file, Status::Format, "not UTF-8");
}

#[test]
fn refuses_tensors_of_unknown_type_or_broken_shape() {
    let mut writer = GgufWriter::new();
    writer.tensor("weight", &[32], 4, vec![0; 64]);
    assert_refused(&writer.finish(), Status::Unsupported, "unknown type 4");
    // Type 40 makes the metadata decoder panic; it is a real type all the same.
    let mut writer = GgufWriter::new();
    writer.tensor("weight", &[64], 40, vec![0; 36]);
    assert!(Header::scan(&writer.finish()).is_ok());
    for (dims, type_number, message) in [
        (&[48][..], 2, "whole Q4_0 blocks"),
        (&[0], 0, "a dimension of 0"),
        (&[1, 1, 1, 1, 1], 0, "5 dimensions"),
        (&[1 << 40, 1 << 40], 0, "a size in 64 bits"),
    ] {
        let mut writer = GgufWriter::new();
        writer.tensor("weight", dims, type_number, vec![0; 64]);
        assert_refused(&writer.finish(), Status::Format, message);
    }
}

#[test]
fn refuses_tensors_beyond_the_file_unaligned_or_overlapping() {
    let mut writer = GgufWriter::new();
    writer.tensor("weight", &[1024], 0, vec![0; 64]);
    assert_refused(&writer.finish(), Status::Format, "beyond the end of the file");

    let mut writer = GgufWriter::new();
    writer.f32_tensor("first", &[8], &[0.0; 8]);
    writer.f32_tensor("second", &[8], &[0.0; 8]);
    let file = writer.finish();
    // The offset of the second tensor follows its name, its one dimension and its type.
    let row = |offset: u64| [&8u64.to_le_bytes()[..], &[0; 4], &offset.to_le_bytes()].concat();
    for (offset, message) in
        [(0, "overlap"), (8, "multiple of 32"), (u64::MAX - 31, "beyond the end")]
    {
        assert_refused(&patched(&file, &row(32), &row(offset)), Status::Format, message);
    }
}
