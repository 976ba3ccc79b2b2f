//! Copies at every place, and their bounds.

use super::*;

#[test]
fn bytes_come_back_at_every_alignment() {
    let memory = HostMemory::allocate(4096).expect("a page can be mapped");
    let pattern: Vec<u8> = (0..64).map(|byte| byte as u8 ^ 0xa5).collect();
    for offset in 0..17 {
        for length in 0..40 {
            memory.copy_in(0, &[0; 128]).expect("inside");
            memory.copy_in(offset, &pattern[..length]).expect("inside");
            let mut whole = [1; 128];
            memory.copy_out(0, &mut whole).expect("inside");
            assert_eq!(whole[offset..offset + length], pattern[..length]);
            assert!(
                whole[..offset]
                    .iter()
                    .chain(&whole[offset + length..])
                    .all(|b| *b == 0)
            );
        }
    }
}

proptest::proptest! {
    #[test]
    fn copies_at_any_place_of_any_memory_are_exact(
        start in 0_usize..17,
        length in 1_usize..60,
        from in 0_usize..60,
        count in 0_usize..60,
        seed in 0_u8..200,
    ) {
        let whole = HostMemory::allocate(4096).expect("a page can be mapped");
        whole.copy_in(0, &[0xee; 128]).expect("inside");
        let addr = (whole.addr() as usize + 16 + start) as *mut u8;
        // SAFETY: the range lies inside `whole`, which lives longer and is used in turns.
        let part = unsafe { HostMemory::from_raw_parts(addr, length) }.expect("a range");
        let bytes: Vec<u8> = (0..count as u8).map(|byte| byte ^ seed).collect();
        let mut expected = [0xee; 128];
        let fits = from + count <= length;
        proptest::prop_assert_eq!(part.copy_in(from, &bytes).is_ok(), fits);
        if fits {
            expected[16 + start + from..][..count].copy_from_slice(&bytes);
            let mut back = vec![0; count];
            part.copy_out(from, &mut back).expect("inside");
            proptest::prop_assert_eq!(back, bytes);
        }
        let mut found = [0; 128];
        whole.copy_out(0, &mut found).expect("inside");
        proptest::prop_assert_eq!(found, expected);
    }
}

#[test]
fn threads_that_share_a_word_do_not_disturb_each_other() {
    let memory = HostMemory::allocate(64).expect("a page can be mapped");
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let memory = &memory;
            scope.spawn(move || {
                let (offset, mut back) = (2 * usize::from(thread), [0; 2]);
                for round in 0..200_000_u32 {
                    let bytes = [thread, round as u8];
                    memory.copy_in(offset, &bytes).expect("inside");
                    memory.copy_out(offset, &mut back).expect("inside");
                    assert_eq!(back, bytes);
                }
            });
        }
    });
}

#[test]
fn access_out_of_bounds_is_refused() {
    let memory = HostMemory::allocate(100).expect("a page can be mapped");
    assert!(memory.copy_in(100, &[]).is_ok());
    assert!(memory.copy_in(100, &[0]).is_err());
    assert!(memory.copy_out(usize::MAX, &mut [0; 2]).is_err());
    assert_eq!(memory.offset_of(memory.addr() + 99, 1), Some(99));
    assert_eq!(memory.offset_of(memory.addr() + 99, 2), None);
    assert_eq!(memory.offset_of(memory.addr() - 1, 1), None);
    assert!(HostMemory::allocate(0).is_err());
}

#[test]
fn descriptors_read_and_write_the_memory_itself() {
    use std::os::fd::AsFd;
    let (left, right) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
    let memory = HostMemory::allocate(4096).expect("a page can be mapped");
    memory.copy_in(8, b"across").expect("inside");
    assert_eq!(memory.send_to(8, 6, left.as_fd()).expect("sent"), 6);
    assert_eq!(memory.read_from(100, 6, right.as_fd()).expect("read"), 6);
    let mut back = [0; 6];
    memory.copy_out(100, &mut back).expect("inside");
    assert_eq!(&back, b"across");
    assert!(memory.read_from(4090, 7, right.as_fd()).is_err());
}
