//! From a backend's event to a value.

use crate::objects::ObjectTable;
use crate::{AsyncEvent, AsyncEventKind, EventSubject};

/// An event as libibverbs hands it out: the kind's number, and 64 bits that hold a port number or
/// an object's key, depending on the kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RawEvent {
    pub(crate) kind: u32,
    pub(crate) element: u64,
}

impl RawEvent {
    /// Resolves the object while it is certain to exist: before the event is acknowledged.
    ///
    /// Numbers that are not known have no subject, since what their 64 bits mean is not known
    /// either. Nothing is ever done with a key but to look it up.
    pub(crate) fn resolve(self, objects: &ObjectTable) -> AsyncEvent {
        use AsyncEventKind as Kind;
        let kind = Kind::from_raw(self.kind);
        let subject = match kind {
            Kind::QpFatal
            | Kind::QpReqErr
            | Kind::QpAccessErr
            | Kind::CommEst
            | Kind::SqDrained
            | Kind::PathMig
            | Kind::PathMigErr
            | Kind::QpLastWqeReached => EventSubject::QueuePair(objects.resolve(self.element)),
            Kind::CqErr => EventSubject::CompletionQueue(objects.resolve(self.element)),
            Kind::PortActive
            | Kind::PortErr
            | Kind::LidChange
            | Kind::PkeyChange
            | Kind::SmChange
            | Kind::ClientReregister
            | Kind::GidChange
            | Kind::DeviceSpeedChange => EventSubject::Port(self.port()),
            Kind::DeviceFatal => EventSubject::Device,
            Kind::SrqErr | Kind::SrqLimitReached | Kind::WqFatal | Kind::Other(_) => {
                EventSubject::Other
            }
        };
        AsyncEvent { kind, subject }
    }

    /// The `int port_num` at the head of the C union; the rest of its bytes means nothing.
    fn port(self) -> u32 {
        let bytes = self.element.to_ne_bytes();
        u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn every_kind_has_the_subject_that_its_element_means() {
        let objects = Arc::new(ObjectTable::default());
        let pair = objects.insert(0xabc0);
        let resolve = |kind, element| RawEvent { kind, element }.resolve(&objects);
        assert_eq!(
            resolve(1, 0xabc0).subject,
            EventSubject::QueuePair(Some(pair.id()))
        );
        assert_eq!(resolve(1, 0xdef0).subject, EventSubject::QueuePair(None));
        assert_eq!(resolve(8, 7).subject, EventSubject::Device);
        for kind in [9, 10, 11, 12, 13, 17, 18, 20] {
            assert_eq!(
                resolve(kind, 2).subject,
                EventSubject::Port(2),
                "kind {kind}"
            );
        }
        let dirty = u64::from_ne_bytes([2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(resolve(18, dirty).subject, EventSubject::Port(2));
    }

    #[test]
    fn numbers_newer_than_the_library_are_values() {
        let objects = ObjectTable::default();
        let speed = RawEvent {
            kind: 20,
            element: 1,
        }
        .resolve(&objects);
        assert_eq!(speed.kind, AsyncEventKind::DeviceSpeedChange);
        let unknown = RawEvent {
            kind: 77,
            element: 0xdead,
        }
        .resolve(&objects);
        assert_eq!(unknown.kind, AsyncEventKind::Other(77));
        assert_eq!(unknown.subject, EventSubject::Other);
    }
}
