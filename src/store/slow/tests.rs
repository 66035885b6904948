use super::*;

/// A store on each medium.
fn stores() -> Vec<(&'static str, SlowStore)> {
    let folder = |limit, io| BasisFolder::open(&std::env::temp_dir(), limit, io).unwrap();
    vec![
        ("memory", SlowStore::default()),
        ("mmap", SlowStore::new(Some(folder(u64::MAX, BasisIo::Mmap)))),
        ("pread", SlowStore::new(Some(folder(u64::MAX, BasisIo::Pread)))),
        ("short mmap", SlowStore::new(Some(folder(1 << 20, BasisIo::Mmap)))),
        ("short pread", SlowStore::new(Some(folder(1 << 20, BasisIo::Pread)))),
    ]
}

fn bytes_of(segment: &Segment) -> Vec<u8> {
    let mut bytes = vec![0; segment.len()];
    segment.copy_to(&mut bytes).unwrap();
    let mut room = vec![0; segment.len()];
    assert_eq!(segment.read(0..segment.len(), &mut room), bytes);
    bytes
}

#[test]
fn counts_what_is_alive() {
    for (name, store) in stores() {
        let segment = store.for_sequence().append(100, |bytes| bytes.fill(7)).unwrap();
        assert_eq!((store.bytes(), bytes_of(&segment)[99]), (100, 7), "{name}");
        assert_eq!(store.file_bytes(), if name == "memory" { 0 } else { 100 });
        assert!(segment.memory().is_none_or(|bytes| bytes.as_ptr().addr().is_multiple_of(64)));
        drop(segment);
        assert_eq!((store.bytes(), store.file_bytes()), (0, 0), "{name}");
    }
}

#[test]
fn segments_of_any_size_keep_to_themselves() {
    for (name, store) in stores() {
        let sizes = [1, 64, 100_000, 200_000, 3 << 20, 5, 20 << 20, 65];
        let segments: Vec<Segment> = sizes
            .iter()
            .enumerate()
            .map(|(i, &len)| {
                let fill = |bytes: &mut [u8]| {
                    assert!(bytes.iter().all(|byte| *byte == 0));
                    bytes.fill(i as u8 + 1);
                };
                store.append(len, fill).unwrap()
            })
            .collect();
        for (i, (segment, &len)) in segments.iter().zip(&sizes).enumerate() {
            let bytes = bytes_of(segment);
            assert_eq!(bytes.len(), len);
            assert!(bytes.iter().all(|byte| *byte == i as u8 + 1), "{name}");
        }
        assert_eq!(store.bytes(), sizes.iter().sum::<usize>() as u64);
        // The short ones went on in memory, and said so once.
        let n_events = usize::from(name.starts_with("short"));
        let events = store.take_events();
        assert_eq!(events.len(), n_events, "{name}: {events:?}");
        assert!(events.iter().all(|event| event.message.contains("goes on in memory")));
    }
}

#[test]
fn threads_append_side_by_side() {
    for (_, store) in stores() {
        std::thread::scope(|scope| {
            for number in 0..4u8 {
                let store = &store;
                scope.spawn(move || {
                    for i in 0..200 {
                        let segment = store.append(1000 + i, |bytes| bytes.fill(number)).unwrap();
                        assert!(bytes_of(&segment).iter().all(|byte| *byte == number));
                    }
                });
            }
        });
        assert_eq!(store.bytes(), 0);
    }
}

#[test]
fn a_file_gives_back_what_nobody_holds() {
    let folder = BasisFolder::open(&std::env::temp_dir(), 8 << 20, BasisIo::Mmap).unwrap();
    let store = SlowStore::new(Some(folder));
    // Ten times the limit, but never more than a few chunks at once.
    for _ in 0..80 {
        let segment = store.for_sequence().append(1 << 20, |bytes| bytes.fill(1)).unwrap();
        assert!(segment.place().0.is_file());
    }
    assert_eq!(store.take_events(), []);
}

#[test]
fn bytes_that_changed_are_found_when_they_are_copied() {
    let folder = BasisFolder::open(&std::env::temp_dir(), u64::MAX, BasisIo::Pread).unwrap();
    let store = SlowStore::new(Some(folder));
    let segment = store.append(1000, |bytes| bytes.fill(1)).unwrap();
    let (chunk, start) = segment.place();
    // SAFETY: nobody reads it meanwhile.
    unsafe { chunk.write(start + 500, &[3]).unwrap() };
    let error = segment.copy_to(&mut [0; 1000]).unwrap_err();
    assert!(error.message.contains("checksum"), "{error}");
}
