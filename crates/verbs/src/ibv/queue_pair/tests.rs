//! Posting against a provider made of a function.

use std::cell::RefCell;

use super::*;
use crate::{PostError, RemoteAddress};

thread_local! {
    /// What the provider was given, as it saw it, and what it is to answer.
    static PROVIDER: RefCell<Provider> = RefCell::default();
}

#[derive(Default)]
struct Provider {
    calls: usize,
    /// (wr_id, pieces, remote address, remote key, flags, opcode) of each link taken.
    taken: Vec<(u64, Vec<Sge>, u64, u32, u32, u32)>,
    /// Links that it takes before it refuses.
    room: usize,
    answer: Answer,
}

#[derive(Clone, Copy, Default)]
enum Answer {
    /// Names the link that it refuses, with `ENOMEM`.
    #[default]
    Named,
    /// Takes all, then fails and names nothing.
    Nameless,
    /// Fails and names something that is not in the chain.
    Astray,
}

unsafe extern "C" fn post_send(
    _: *mut ffi::ibv_qp,
    head: *mut ffi::ibv_send_wr,
    bad: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    PROVIDER.with_borrow_mut(|provider| {
        provider.calls += 1;
        let mut link = head;
        // SAFETY: the chain is valid for the call, and `bad` a place for a pointer.
        unsafe {
            *bad = ptr::null_mut();
            while !link.is_null() {
                if provider.room == 0 {
                    match provider.answer {
                        Answer::Named => *bad = link,
                        Answer::Nameless => {}
                        Answer::Astray => *bad = head.byte_add(8),
                    }
                    return libc::ENOMEM;
                }
                provider.room -= 1;
                let raw = &*link;
                assert_eq!(raw.imm_data_invalidated_rkey_union.imm_data, 0);
                assert_eq!(raw.qp_type.xrc.remote_srqn, 0);
                assert_eq!(raw.bind_mw_tso_union.tso.hdr, ptr::null_mut());
                let pieces = std::slice::from_raw_parts(raw.sg_list, raw.num_sge as usize);
                let pieces = pieces.iter().map(|sge| Sge {
                    addr: sge.addr,
                    length: sge.length,
                    lkey: sge.lkey,
                });
                provider.taken.push((
                    raw.wr_id,
                    pieces.collect(),
                    raw.wr.rdma.remote_addr,
                    raw.wr.rdma.rkey,
                    raw.send_flags,
                    raw.opcode,
                ));
                link = raw.next;
            }
        }
        0
    })
}

fn pair() -> QueuePair {
    QueuePair {
        raw: NonNull::dangling(),
        post: post_send,
        capacity: QpCapacity {
            send_wr_max: 1,
            recv_wr_max: 1,
            send_sge_max: 1,
            recv_sge_max: 1,
            inline_bytes_max: 0,
        },
    }
}

fn batch(count: usize) -> Vec<WorkRequest> {
    (0..count as u64)
        .map(|index| {
            let piece = |part: u64| Sge {
                addr: 0x1000 * index + part,
                length: index as u32 + 1,
                lkey: 7,
            };
            let pieces: Vec<Sge> = (0..index % 5).map(piece).collect();
            let remote = RemoteAddress {
                addr: 0xabc0_0000 + index,
                rkey: index as u32,
            };
            let opcode = if index % 2 == 0 {
                RdmaOpcode::Write
            } else {
                RdmaOpcode::Read
            };
            let mut request = WorkRequest::new(opcode, index, &pieces, remote);
            request.signaled = index % 3 == 0;
            request.fence = index % 7 == 0;
            request
        })
        .collect()
}

/// Posts `count` requests to a provider with that much room.
fn post(count: usize, room: usize, answer: Answer) -> Result<(), PostRefusal> {
    PROVIDER.set(Provider {
        room,
        answer,
        ..Provider::default()
    });
    pair().post(&batch(count))
}

#[test]
fn the_provider_sees_each_request_once_and_whole() {
    for count in [0, 1, 15, 16, 17, 32, 33, 100] {
        post(count, usize::MAX, Answer::Named).expect("there is room");
        let requests = batch(count);
        PROVIDER.with_borrow(|provider| {
            assert_eq!(provider.calls, count.div_ceil(CHUNK));
            assert_eq!(provider.taken.len(), count);
            for (taken, request) in provider.taken.iter().zip(&requests) {
                let flags = u32::from(request.fence) | u32::from(request.signaled) << 1;
                let opcode = if request.opcode == RdmaOpcode::Read {
                    4
                } else {
                    0
                };
                assert_eq!(taken.0, request.wr_id);
                assert_eq!(taken.1, request.sges());
                assert_eq!(
                    (taken.2, taken.3),
                    (request.remote.addr, request.remote.rkey)
                );
                assert_eq!((taken.4, taken.5), (flags, opcode));
            }
        });
    }
}

#[test]
fn a_refused_request_is_named_by_its_place_in_the_batch() {
    for room in 0..50 {
        let refused = post(50, room, Answer::Named).expect_err("there is no room");
        assert_eq!(refused.posted, room);
        assert_eq!(refused.in_doubt, 0);
        assert_eq!(refused.errno, Errno(libc::ENOMEM));
        PROVIDER.with_borrow(|provider| assert_eq!(provider.taken.len(), room));
    }
}

#[test]
fn an_error_that_names_nothing_leaves_the_chunk_in_doubt() {
    for answer in [Answer::Nameless, Answer::Astray] {
        let refused = post(50, 20, answer).expect_err("there is no room");
        // The first chunk of 16 is certain. The provider took 4 of the second, and cannot say so.
        assert_eq!((refused.posted, refused.in_doubt), (16, 16));
        let refused = post(3, 3, answer);
        assert_eq!(refused, Ok(()));
        let refused = post(3, 2, answer).expect_err("there is no room");
        assert_eq!((refused.posted, refused.in_doubt), (0, 3));
    }
}

#[test]
fn a_full_queue_is_told_from_doubt() {
    let error = |in_doubt| PostError {
        posted: 0,
        in_doubt,
        cause: crate::VerbsError::Verb {
            verb: "ibv_post_send",
            device: std::sync::Arc::from("test0"),
            port: None,
            errno: libc::ENOMEM,
        },
    };
    assert!(error(0).is_queue_full());
    assert!(!error(1).is_queue_full());
}

#[test]
fn unused_attributes_are_zero() {
    let attr = zeroed_attr(state::IBV_QPS_RTR);
    assert_eq!(attr.qp_state, state::IBV_QPS_RTR);
    let words = [
        attr.cur_qp_state,
        attr.path_mtu,
        attr.path_mig_state,
        attr.qkey,
        attr.rq_psn,
        attr.sq_psn,
        attr.dest_qp_num,
        attr.qp_access_flags,
        attr.cap.max_send_wr,
        attr.cap.max_inline_data,
        attr.ah_attr.grh.flow_label,
        attr.alt_ah_attr.grh.flow_label,
        attr.rate_limit,
    ];
    assert_eq!(words, [0; 13]);
    let bytes = [
        attr.en_sqd_async_notify,
        attr.sq_draining,
        attr.max_rd_atomic,
        attr.max_dest_rd_atomic,
        attr.min_rnr_timer,
        attr.port_num,
        attr.timeout,
        attr.retry_cnt,
        attr.rnr_retry,
        attr.alt_port_num,
        attr.alt_timeout,
        attr.alt_ah_attr.port_num,
    ];
    assert_eq!(bytes, [0; 12]);
}

#[test]
fn numbers_too_large_for_the_c_struct_are_refused() {
    let path = PathAttr {
        port: 1,
        dgid: Gid::NULL,
        dlid: 0,
        sgid_index: 255,
        hop_limit: 64,
        traffic_class: 0,
        flow_label: 0,
        service_level: 0,
    };
    assert_eq!(
        address(&path).map(|address| address.grh.sgid_index),
        Ok(255)
    );
    let far = PathAttr {
        sgid_index: 256,
        ..path
    };
    assert_eq!(address(&far).map(drop), Err(Errno(libc::EINVAL)));
    let port = PathAttr { port: 257, ..path };
    assert_eq!(address(&port).map(drop), Err(Errno(libc::EINVAL)));
}
