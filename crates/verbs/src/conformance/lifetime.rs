//! Making, dropping and misusing objects.

use super::{
    Endpoint, Fabric, MEMORY_BYTES, Side, assert_closed, assert_destroyed, connect, connected,
    create_pair,
};
use crate::{AccessFlags, HostMemory, QpCapacity, QpInit, QpState, VerbsError, WorkRequest};

/// 200 pairs, connected half of the time, each with an identity of its own.
pub(super) fn x13_queue_pairs_come_and_go(fabric: &dyn Fabric) {
    let mut initiator = Endpoint::open(fabric, Side::Initiator);
    let mut target = Endpoint::open(fabric, Side::Target);
    let mut identities = std::collections::BTreeSet::new();
    for round in 0..200 {
        assert!(
            identities.insert(initiator.pair.id()),
            "an identity was used again"
        );
        if round % 2 == 0 {
            connect(&initiator, &target);
            let attr = initiator.pair.query().expect("a query");
            assert_eq!(attr.state, QpState::ReadyToSend);
            assert_eq!(attr.dest_qp_num, target.pair.qp_num());
        }
        initiator.pair = create_pair(&initiator.pd, &initiator.queue);
        target.pair = create_pair(&target.pd, &target.queue);
    }
    assert_destroyed(&initiator.context);
    initiator.close();
    target.close();
}

/// Whatever the order in which handles are dropped, the device sees the one that works.
pub(super) fn objects_may_be_dropped_in_any_order(fabric: &dyn Fabric) {
    const MEMORY: usize = 3;
    // Each order is a rotation, forwards or backwards, of the order of creation.
    for order in 0..12 {
        let (initiator, target) = connected(fabric);
        initiator
            .pair
            .post(&[WorkRequest::write(
                1,
                initiator.local(0, 4096),
                target.remote(0),
            )])
            .expect("posted");
        let control = initiator.context.control().clone();
        let Endpoint {
            pair,
            queue,
            region,
            memory,
            pd,
            context,
            ..
        } = initiator;
        let mut objects: Vec<Option<Box<dyn Send>>> = vec![
            Some(Box::new(context)),
            Some(Box::new(pd)),
            Some(Box::new(queue)),
            Some(Box::new(memory)),
            Some(Box::new(region)),
            Some(Box::new(pair)),
        ];
        let count = objects.len();
        for step in 0..count {
            let index = (order + step) % count;
            let index = if order < count {
                index
            } else {
                count - 1 - index
            };
            // Plain memory does not keep a device open.
            let keeps_open = objects
                .iter()
                .enumerate()
                .any(|(index, object)| index != MEMORY && object.is_some());
            assert!(
                !keeps_open || !control.is_closed(),
                "closed while objects were left"
            );
            drop(objects[index].take());
        }
        assert_closed(&control);
        target.close();
    }
}

/// A region keeps its memory: dropping the handle first changes nothing for the peer.
pub(super) fn memory_outlives_its_handle(fabric: &dyn Fabric) {
    let (initiator, target) = connected(fabric);
    initiator.memory.copy_in(0, b"still there").expect("inside");
    let Endpoint {
        pair,
        region,
        memory,
        context,
        queue,
        pd,
        ..
    } = target;
    drop(memory);
    let place = crate::RemoteAddress {
        addr: region.addr(),
        rkey: region.rkey(),
    };
    let write = WorkRequest::write(1, initiator.local(0, 11), place);
    initiator.pair.post(&[write]).expect("posted");
    let done = super::completions(fabric, &initiator.queue, 1)[0];
    assert_eq!(done.status, crate::WcStatus::Success);
    let mut found = [0; 11];
    region
        .memory()
        .expect("host memory")
        .copy_out(0, &mut found)
        .expect("inside");
    assert_eq!(&found, b"still there");
    let control = context.control().clone();
    drop((pair, region, pd, context, queue));
    assert_closed(&control);
    initiator.close();
}

/// Queues of another context are refused before any backend sees them.
pub(super) fn objects_of_two_contexts_do_not_mix(fabric: &dyn Fabric) {
    let one = fabric.open(Side::Initiator);
    let other = fabric.open(Side::Initiator);
    let pd = one.alloc_pd().expect("a domain");
    let own = one.create_cq(8).expect("a queue");
    let foreign = other.create_cq(8).expect("a queue");
    for (send_cq, recv_cq) in [(&own, &foreign), (&foreign, &own)] {
        let made = pd.create_qp(QpInit {
            send_cq,
            recv_cq,
            capacity: QpCapacity {
                send_wr_max: 1,
                recv_wr_max: 1,
                send_sge_max: 1,
                recv_sge_max: 1,
                inline_bytes_max: 0,
            },
        });
        assert!(
            matches!(made, Err(VerbsError::ForeignObject { .. })),
            "{made:?}"
        );
    }
}

/// Ranges, ports and states that make no sense are errors, not surprises.
pub(super) fn bad_arguments_are_errors(fabric: &dyn Fabric) {
    let endpoint = Endpoint::open(fabric, Side::Initiator);
    let pd = &endpoint.pd;
    let memory = HostMemory::allocate(4096).expect("memory");
    let access = AccessFlags::LOCAL_WRITE;
    for (offset, length) in [(0, 4097), (4096, 1), (usize::MAX, 2), (1, usize::MAX)] {
        let made = pd.register(&memory, offset, length, access);
        assert!(
            matches!(made, Err(VerbsError::OutOfBounds(_))),
            "{offset} {length}"
        );
    }
    let errno = |result: Result<_, VerbsError>| result.err().and_then(|error| error.errno());
    assert_eq!(
        errno(pd.register(&memory, 0, 0, access).map(drop)),
        Some(libc::EINVAL)
    );
    let wraps = pd.register_with_iova(&memory, 0, 4096, u64::MAX - 4095, access);
    assert_eq!(errno(wraps.map(drop)), Some(libc::EINVAL));
    for port in [0, 77, 256, 257] {
        let attr = endpoint.context.port_attr(port);
        assert!(attr.is_err(), "port {port}");
    }
    // Not from RESET.
    assert!(endpoint.pair.to_rts(&super::rts()).is_err());
    assert_eq!(
        endpoint.pair.query().expect("a query").state,
        QpState::Reset
    );
    assert!(endpoint.context.create_cq(u32::MAX).is_err());
    assert_eq!(endpoint.region.length(), MEMORY_BYTES);
    endpoint.close();
}
