use super::*;

const MODEL: [u8; 32] = [7; 32];

fn image() -> Image {
    let store = SlowStore::default();
    let mut image = Image::default();
    image.u32(99);
    image.blob(vec![1; 100]);
    image.blob(Vec::new());
    for (len, byte) in [(64, 2), (1000, 3)] {
        image.segment(&store.append(len, |bytes| bytes.fill(byte)).unwrap());
    }
    image
}

fn written(image: &Image) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&MODEL, image, &mut |part| {
        bytes.extend_from_slice(part);
        Ok(())
    })
    .unwrap();
    bytes
}

fn read_from(bytes: &[u8], len: Option<u64>) -> Result<(Vec<u8>, Parts)> {
    let mut rest = bytes;
    let identity = Identity { fingerprint: &MODEL, len };
    read(&identity, &SlowStore::default(), &mut |out| {
        let Some((part, more)) = rest.split_at_checked(out.len()) else {
            fail!(Io, "the bytes end");
        };
        out.copy_from_slice(part);
        rest = more;
        Ok(())
    })
}

#[test]
fn an_image_is_read_as_it_was_written() {
    let image = image();
    let bytes = written(&image);
    assert_eq!(bytes.len() as u64, size(&image));
    assert_eq!(bytes.len() % ALIGN, 0);
    for len in [None, Some(bytes.len() as u64)] {
        let (index, parts) = read_from(&bytes, len).unwrap();
        assert_eq!(index, image.index);
        assert_eq!(
            parts.blobs.iter().map(|b| b.to_vec()).collect::<Vec<_>>(),
            [vec![1; 100], vec![]]
        );
        assert_eq!(parts.segments[1].memory().unwrap(), [3; 1000]);
    }
}

#[test]
fn a_cut_or_longer_state_is_refused() {
    let bytes = written(&image());
    for len in 0..bytes.len() {
        assert!(read_from(&bytes[..len], None).is_err(), "{len}");
        assert!(read_from(&bytes[..len], Some(len as u64)).is_err(), "{len}");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(read_from(&longer, Some(longer.len() as u64)).is_err());
}

#[test]
fn every_flipped_bit_is_found() {
    let bytes = written(&image());
    for bit in 0..8 * bytes.len() {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(read_from(&damaged, None).is_err(), "bit {bit}");
    }
}

#[test]
fn says_what_kind_of_state_it_is_not() {
    let bytes = written(&image());
    let message = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        let sum = checksum(&bytes[..HEADER - 4]);
        bytes[HEADER - 4..HEADER].copy_from_slice(&sum.to_le_bytes());
        read_from(&bytes, None).err().unwrap().message
    };
    assert!(message(&|bytes| bytes[0] = b'G').contains("not a state"));
    assert!(message(&|bytes| bytes[8] = 2).contains("version 2, expected 1"));
    assert!(message(&|bytes| bytes[12..16].reverse()).contains("order of bytes"));
    assert!(message(&|bytes| bytes[20] = 0).contains("another model"));
    // Lengths that no memory has.
    assert!(message(&|bytes| bytes[48..64].fill(0xff)).contains("bytes end"));
    assert!(message(&|bytes| bytes[48..56].fill(0)).contains("longer than the state"));
}

/// Zeros that take no memory.
struct Zeros(memmap2::MmapMut);

impl crate::store::Stored for Zeros {
    fn stored(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(target_pointer_width = "64")]
#[test]
fn lengths_beyond_4_gib_are_what_they_are() {
    let mut image = Image::default();
    let len = (4usize << 30) + 100;
    let Ok(zeros) = memmap2::MmapOptions::new().len(len).no_reserve_swap().map_anon() else {
        return;
    };
    image.blobs.push(std::sync::Arc::new(Zeros(zeros)));
    let (mut header, mut total) = (Vec::new(), 0);
    write(&MODEL, &image, &mut |part| {
        if header.is_empty() {
            header.extend_from_slice(part);
        }
        total += part.len() as u64;
        Ok(())
    })
    .unwrap();
    assert_eq!(total, size(&image));
    assert_eq!(total, 128 + 64 + (4 << 30) + 128);
    assert_eq!(number(&header, 48), total);
    // Of such a length, but without the bytes: an error, and no memory is touched.
    let identity = Identity { fingerprint: &MODEL, len: Some(total - 1) };
    let mut source = |out: &mut [u8]| {
        out.copy_from_slice(&header);
        Ok(())
    };
    let error = read(&identity, &SlowStore::default(), &mut source).err().unwrap();
    assert!(error.message.contains("header says"), "{error}");
}
