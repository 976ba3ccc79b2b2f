//! GID tables and asynchronous events.

use std::net::Ipv4Addr;

use super::{Endpoint, Fabric, Side, assert_destroyed, eventually, init, rtr};
use crate::{
    AsyncEvent, AsyncEventKind, Context, EventSubject, Gid, PortState, VerbsError, WorkRequest,
};

/// Takes the events that wait.
fn drain(context: &Context) -> Vec<AsyncEvent> {
    let mut events = Vec::new();
    while let Some(event) = context.next_event().expect("the channel works") {
        events.push(event);
        assert!(events.len() < 10_000, "the queue does not end");
    }
    events
}

/// The table has no empty rows, ascends by index, and stays within its size.
pub(super) fn gid_rows_are_in_use_and_in_order(fabric: &dyn Fabric) {
    for side in [Side::Initiator, Side::Target] {
        let context = fabric.open(side);
        let port = fabric.port(side);
        let rows = context.gid_table(port).expect("the GID table");
        let length = context.port_attr(port).expect("the port").gid_tbl_len;
        assert!(!rows.is_empty());
        assert!(
            rows.iter()
                .all(|row| row.gid != Gid::NULL && row.index < length)
        );
        assert!(rows.windows(2).all(|two| two[0].index < two[1].index));
        for wrong in [0, 200, 256, 257] {
            let error = context.gid_table(wrong).expect_err("no such port");
            assert!(
                error.to_string().contains(&format!("port {wrong}")),
                "{error}"
            );
        }
    }
}

/// An index without a row is refused when the peer is named, with the error number.
pub(super) fn an_empty_gid_index_is_refused(fabric: &dyn Fabric) {
    let initiator = Endpoint::open(fabric, Side::Initiator);
    let target = Endpoint::open(fabric, Side::Target);
    let rows = initiator
        .context
        .gid_table(initiator.port)
        .expect("the GID table");
    let empty = (0..)
        .find(|index| rows.iter().all(|row| row.index != *index))
        .expect("an index without a row");
    initiator
        .pair
        .to_init(&init(initiator.port))
        .expect("to INIT");
    let mut attr = rtr(&initiator, &target);
    attr.path.sgid_index = empty;
    match initiator.pair.to_rtr(&attr) {
        Err(VerbsError::Verb {
            verb, port, errno, ..
        }) => {
            assert_eq!(verb, "ibv_modify_qp(RTR)");
            assert_eq!(port, Some(initiator.port));
            assert!(
                [libc::ENODATA, libc::EINVAL, libc::ENODEV, libc::ENOENT].contains(&errno),
                "errno {errno}"
            );
        }
        other => panic!("not refused: {other:?}"),
    }
    initiator.close();
    target.close();
}

/// The port goes down and comes up, each with an event, and reads as such.
pub(super) fn a_link_flap_is_two_kinds_of_events(fabric: &dyn Fabric) {
    let side = Side::Initiator;
    let context = fabric.open(side);
    let port = fabric.port(side);
    drain(&context);
    if !fabric.set_link(side, false) {
        return;
    }
    let mut seen = Vec::new();
    let expected = |kind| AsyncEvent {
        kind,
        subject: EventSubject::Port(port),
    };
    eventually(fabric, "PORT_ERR", || {
        seen.extend(drain(&context));
        seen.contains(&expected(AsyncEventKind::PortErr))
    });
    eventually(fabric, "the port reads as down", || {
        context.port_attr(port).expect("the port").state == PortState::Down
    });
    seen.clear();
    assert!(fabric.set_link(side, true));
    eventually(fabric, "PORT_ACTIVE", || {
        seen.extend(drain(&context));
        seen.contains(&expected(AsyncEventKind::PortActive))
    });
    eventually(fabric, "the port reads as active", || {
        context.port_attr(port).expect("the port").state.is_active()
    });
}

/// A new address is a new row and an event; so is its end.
pub(super) fn a_gid_comes_and_goes_with_events(fabric: &dyn Fabric) {
    let side = Side::Initiator;
    let context = fabric.open(side);
    let port = fabric.port(side);
    let gid = Gid::from_ipv4(Ipv4Addr::new(192, 168, 91, 7));
    let has_row = || {
        context
            .gid_table(port)
            .expect("the table")
            .iter()
            .any(|row| row.gid == gid)
    };
    let is_change = |event: &AsyncEvent| {
        event.kind == AsyncEventKind::GidChange && event.subject == EventSubject::Port(port)
    };
    drain(&context);
    assert!(!has_row());
    if !fabric.set_gid(side, gid, true) {
        return;
    }
    let mut seen = Vec::new();
    eventually(fabric, "GID_CHANGE for a new row", || {
        seen.extend(drain(&context));
        seen.iter().any(is_change)
    });
    eventually(fabric, "the row is there", has_row);
    drain(&context);
    seen.clear();
    assert!(fabric.set_gid(side, gid, false));
    eventually(fabric, "GID_CHANGE for a lost row", || {
        seen.extend(drain(&context));
        seen.iter().any(is_change)
    });
    eventually(fabric, "the row is gone", || !has_row());
}

/// More completions than fit: the event names the queue, and destroying it does not wait for
/// anybody to acknowledge.
pub(super) fn an_overrun_queue_names_itself(fabric: &dyn Fabric) {
    let initiator = Endpoint::open_sized(fabric, Side::Initiator, 1);
    let target = Endpoint::open(fabric, Side::Target);
    super::connect(&initiator, &target);
    let batch: Vec<_> = (0..64).map(WorkRequest::zero_length_read).collect();
    initiator.pair.post(&batch).expect("posted");
    let mut seen = Vec::new();
    let expected = AsyncEvent {
        kind: AsyncEventKind::CqErr,
        subject: EventSubject::CompletionQueue(Some(initiator.queue.id())),
    };
    eventually(fabric, "CQ_ERR", || {
        seen.extend(drain(&initiator.context));
        seen.contains(&expected)
    });
    let context = initiator.context.clone();
    drop(initiator);
    assert_destroyed(&context);
    // Whatever else waits about the queue, it is gone now.
    for event in drain(&context) {
        assert_ne!(event.subject, expected.subject, "{event:?}");
    }
    target.close();
}
