use std::net::Ipv4Addr;

use rerail_verbs::Mtu;

use super::*;

fn parties(local: &str, peer: &str) -> Parties {
    Parties {
        local_path: local.into(),
        peer_path: peer.into(),
        instance: Some(format!("instance of {local}")),
        peer_instance: None,
        fallback: None,
    }
}

fn endpoint(local: &str, peer: &str) -> Endpoint {
    Endpoint::new(Time::ZERO, parties(local, peer), Limits::default())
}

fn refused(reason: &str) -> SignalError {
    SignalError::Refused(reason.into())
}

fn ends(first_qp: u32) -> LocalEnds {
    LocalEnds {
        gid: Some(Gid::from_ipv4(Ipv4Addr::new(10, 0, 0, first_qp as u8))),
        lid: 0,
        qp_nums: vec![first_qp, first_qp + 1],
        psn: first_qp * 100,
        path_mtu: Some(Mtu::Mtu4096),
        rd_atomic: 16,
    }
}

fn offer(local: &str, peer: &str, first_qp: u32) -> Offer {
    Offer {
        local_path: local.into(),
        peer_path: peer.into(),
        gid: ends(first_qp).gid,
        qp_nums: ends(first_qp).qp_nums,
        ready_ack: Some(false),
        ..Offer::default()
    }
}

fn at(millis: u64) -> Time {
    Time::from_millis(millis)
}

fn actions(endpoint: &mut Endpoint) -> Vec<Action> {
    std::iter::from_fn(|| endpoint.poll()).collect()
}

fn handle(endpoint: &mut Endpoint, input: Input) -> Vec<Action> {
    endpoint.handle(at(1), input);
    actions(endpoint)
}

/// An active endpoint `a` whose request to `b` is out.
fn offered() -> Endpoint {
    let mut endpoint = endpoint("a", "b");
    assert_eq!(handle(&mut endpoint, Input::Open), [Action::Prepare]);
    let out = handle(&mut endpoint, Input::Prepared(Ok(ends(1))));
    assert!(matches!(&out[..], [Action::Ask(offer)]
        if offer.qp_nums == [1, 2] && offer.ready_ack == Some(false)));
    endpoint
}

fn connected() -> Endpoint {
    let mut endpoint = offered();
    handle(&mut endpoint, Input::Replied(Ok(offer("b", "a", 5))));
    handle(&mut endpoint, Input::Raised(Ok(())));
    assert_eq!(
        handle(&mut endpoint, Input::Acknowledged(Ok(()))),
        [Action::Attach]
    );
    endpoint
}

#[test]
fn the_active_side_posts_only_after_its_acknowledgement_was_taken() {
    let mut endpoint = offered();
    let out = handle(&mut endpoint, Input::Replied(Ok(offer("b", "a", 5))));
    assert!(matches!(&out[..], [Action::Raise(peer)] if peer.qp_nums == [5, 6]));
    let out = handle(&mut endpoint, Input::Raised(Ok(())));
    assert!(matches!(&out[..], [Action::Acknowledge(offer)] if offer.ready_ack == Some(true)));
    assert!(!endpoint.is_connected());
    assert_eq!(
        handle(&mut endpoint, Input::Acknowledged(Ok(()))),
        [Action::Attach]
    );
    assert!(endpoint.is_connected());
}

#[test]
fn an_old_peer_without_ready_ack_is_connected_at_once() {
    let mut endpoint = offered();
    let reply = Offer {
        ready_ack: None,
        ..offer("b", "a", 5)
    };
    handle(&mut endpoint, Input::Replied(Ok(reply)));
    assert_eq!(
        handle(&mut endpoint, Input::Raised(Ok(()))),
        [Action::Attach]
    );
}

#[test]
fn the_passive_side_answers_from_rts_and_waits_for_the_acknowledgement() {
    let mut endpoint = endpoint("b", "a");
    let request = Input::Requested(Token(1), offer("a", "b", 1));
    assert_eq!(handle(&mut endpoint, request), [Action::Prepare]);
    let out = handle(&mut endpoint, Input::Prepared(Ok(ends(5))));
    assert!(matches!(&out[..], [Action::Raise(_)]));
    let out = handle(&mut endpoint, Input::Raised(Ok(())));
    assert!(matches!(&out[..], [Action::Answer(Token(1), offer)] if offer.qp_nums == [5, 6]));
    assert!(!endpoint.is_connected());

    let stale = Offer {
        ready_ack: Some(true),
        ..offer("a", "b", 3)
    };
    let out = handle(&mut endpoint, Input::Requested(Token(2), stale));
    assert!(matches!(&out[..], [Action::Refuse(Token(2), _)]));
    let ack = Offer {
        ready_ack: Some(true),
        ..offer("a", "b", 1)
    };
    let out = handle(&mut endpoint, Input::Requested(Token(3), ack));
    assert!(matches!(
        &out[..],
        [Action::Answer(Token(3), _), Action::Attach]
    ));
}

#[test]
fn a_passive_side_without_acknowledgement_gives_up_after_ten_seconds() {
    let mut endpoint = endpoint("b", "a");
    handle(
        &mut endpoint,
        Input::Requested(Token(1), offer("a", "b", 1)),
    );
    handle(&mut endpoint, Input::Prepared(Ok(ends(5))));
    handle(&mut endpoint, Input::Raised(Ok(())));
    assert_eq!(endpoint.next_timeout(), Some(at(10_001)));
    endpoint.handle_timeout(at(10_000));
    assert!(actions(&mut endpoint).is_empty());
    endpoint.handle_timeout(at(10_001));
    assert!(endpoint.is_closing());
    assert!(actions(&mut endpoint).contains(&Action::ToError));
}

#[test]
fn h03_simultaneous_open_ends_on_one_pair_of_queue_pairs() {
    // Every order in which the two requests, answers and acknowledgements can arrive.
    for order in 0..4 {
        let mut left = offered();
        let mut right = endpoint("b", "a");
        handle(&mut right, Input::Open);
        handle(&mut right, Input::Prepared(Ok(ends(5))));
        let take = |endpoint: &mut Endpoint, request: Offer| -> Offer {
            handle(endpoint, Input::Requested(Token(9), request));
            let out = handle(endpoint, Input::Raised(Ok(())));
            let [Action::Answer(Token(9), answer)] = &out[..] else {
                panic!("{out:?}");
            };
            answer.clone()
        };
        let asks = |local, peer, first_qp| Offer {
            psn: Some(ends(first_qp).psn),
            ..offer(local, peer, first_qp)
        };
        let to_left = take(&mut right, asks("a", "b", 1));
        let to_right = take(&mut left, asks("b", "a", 5));
        let replies = |left: &mut Endpoint, right: &mut Endpoint| {
            let mut acks = Vec::new();
            for (endpoint, answer) in [(left, &to_left), (right, &to_right)] {
                for action in handle(endpoint, Input::Replied(Ok(answer.clone()))) {
                    match action {
                        Action::Acknowledge(offer) => acks.push(offer),
                        other => panic!("{other:?}"),
                    }
                }
            }
            acks
        };
        let acks = replies(&mut left, &mut right);
        let [left_ack, right_ack] = &acks[..] else {
            panic!("both acknowledge: {acks:?}");
        };
        let mut attached = 0;
        let mut count = |out: Vec<Action>| {
            attached += out
                .iter()
                .filter(|action| **action == Action::Attach)
                .count();
        };
        let deliver = |from: usize, left: &mut Endpoint, right: &mut Endpoint| match from {
            0 => handle(right, Input::Requested(Token(7), left_ack.clone())),
            1 => handle(left, Input::Requested(Token(8), right_ack.clone())),
            2 => handle(left, Input::Acknowledged(Ok(()))),
            _ => handle(right, Input::Acknowledged(Ok(()))),
        };
        for step in 0..4 {
            count(deliver((order + step) % 4, &mut left, &mut right));
        }
        assert!(left.is_connected() && right.is_connected(), "order {order}");
        assert_eq!(attached, 2, "each side once, order {order}");
    }
}

#[test]
fn our_refused_request_does_not_undo_the_peers_own() {
    let mut endpoint = offered();
    handle(
        &mut endpoint,
        Input::Requested(Token(1), offer("b", "a", 5)),
    );
    handle(&mut endpoint, Input::Raised(Ok(())));
    assert!(handle(&mut endpoint, Input::Replied(Err(refused("busy")))).is_empty());
    let ack = Offer {
        ready_ack: Some(true),
        ..offer("b", "a", 5)
    };
    let out = handle(&mut endpoint, Input::Requested(Token(2), ack));
    assert!(out.contains(&Action::Attach));
}

#[test]
fn h06_a_rebuilt_peer_retires_the_old_end_and_its_request_goes_on() {
    let mut endpoint = connected();
    let out = handle(
        &mut endpoint,
        Input::Requested(Token(4), offer("b", "a", 50)),
    );
    assert!(matches!(
        &out[..],
        [Action::Detach, Action::ToError, Action::PassOn(Token(4), offer)]
            if offer.qp_nums == [50, 51]
    ));
}

#[test]
fn h14_an_endpoint_that_failed_is_never_used_again() {
    let mut endpoint = connected();
    handle(
        &mut endpoint,
        Input::Close(CloseCause::Local("a fault".into())),
    );
    for _ in 0..2 {
        assert!(endpoint.is_closing());
        assert_eq!(handle(&mut endpoint, Input::Open), []);
        // A peer that connects again is passed on, to an endpoint that is made for it.
        let again = handle(
            &mut endpoint,
            Input::Requested(Token(9), offer("b", "a", 60)),
        );
        assert!(
            matches!(&again[..], [Action::PassOn(Token(9), offer)] if offer.qp_nums == [60, 61]),
            "{again:?}"
        );
        // Also once all of it is gone.
        handle(&mut endpoint, Input::InError);
        handle(&mut endpoint, Input::Drained);
        handle(&mut endpoint, Input::Destroyed);
        handle(&mut endpoint, Input::PeerClosed);
    }
    assert!(endpoint.is_closed());
}

#[test]
fn a_repeated_request_is_answered_again() {
    let mut endpoint = connected();
    let out = handle(
        &mut endpoint,
        Input::Requested(Token(4), offer("b", "a", 5)),
    );
    assert!(matches!(&out[..], [Action::Answer(Token(4), offer)] if offer.qp_nums == [1, 2]));
    assert!(endpoint.is_connected());
}

#[test]
fn h20_unequal_counts_wrong_paths_and_300_queue_pairs_are_refused_with_the_reason() {
    for (bad, word) in [
        (
            Offer {
                qp_nums: vec![1],
                ..offer("a", "b", 1)
            },
            "MC_NUM_QP_PER_EP",
        ),
        (
            Offer {
                qp_nums: (0..300).collect(),
                ..offer("a", "b", 1)
            },
            "MC_NUM_QP_PER_EP",
        ),
        (offer("a", "c", 1), "paths"),
        (offer("z", "b", 1), "paths"),
        (
            Offer {
                gid: None,
                ..offer("a", "b", 1)
            },
            "GID",
        ),
    ] {
        let mut endpoint = endpoint("b", "a");
        handle(&mut endpoint, Input::Requested(Token(1), bad));
        let out = handle(&mut endpoint, Input::Prepared(Ok(ends(5))));
        let refused = out
            .iter()
            .any(|action| matches!(action, Action::Refuse(Token(1), text) if text.contains(word)));
        assert!(refused, "{out:?}");
        assert!(endpoint.is_closing());
    }
}

#[test]
fn h18_a_refusal_is_the_cause_in_the_peers_words() {
    let mut endpoint = offered();
    handle(&mut endpoint, Input::Replied(Err(refused("no such NIC"))));
    let out = handle(&mut endpoint, Input::InError);
    assert_eq!(out, [Action::Fenced, Action::Destroy]);
    let out = handle(&mut endpoint, Input::Destroyed);
    let cause = CloseCause::Refused("no such NIC".into());
    assert_eq!(out, [Action::Closed(cause)]);
}

#[test]
fn a_request_meant_for_an_earlier_instance_is_refused_and_leaves_no_endpoint() {
    let mut endpoint = endpoint("b", "a");
    let request = Offer {
        peer_instance: Some("older".into()),
        ..offer("a", "b", 1)
    };
    let out = handle(&mut endpoint, Input::Requested(Token(1), request));
    let [Action::Refuse(Token(1), refusal), Action::Closed(cause)] = &out[..] else {
        panic!("{out:?}");
    };
    assert!(refusal.contains("older"), "{refusal}");
    assert_eq!(*cause, CloseCause::Mismatch(refusal.clone()));
}

#[test]
fn an_answer_of_another_instance_or_its_refusal_means_that_the_peer_was_restarted() {
    let mut passive = endpoint("b", "a");
    let meant = Offer {
        peer_instance: Some("older".into()),
        ..offer("a", "b", 1)
    };
    let out = handle(&mut passive, Input::Requested(Token(1), meant));
    let [Action::Refuse(_, refusal), ..] = &out[..] else {
        panic!("{out:?}");
    };
    let younger = Offer {
        instance: Some("younger".into()),
        ..offer("b", "a", 5)
    };
    for reply in [Err(refused(refusal)), Ok(younger)] {
        let mut active = offered();
        active.parties.peer_instance = Some("older".into());
        handle(&mut active, Input::Replied(reply));
        let cause = active.close_cause();
        assert!(
            matches!(cause, Some(CloseCause::PeerRestarted(_))),
            "{cause:?}"
        );
    }
}

#[test]
fn a_cut_endpoint_is_drained_before_it_is_destroyed_and_fenced_by_the_peers_word() {
    let mut endpoint = connected();
    let out = handle(
        &mut endpoint,
        Input::Close(CloseCause::Broken("RETRY_EXC_ERR".into())),
    );
    assert!(matches!(
        &out[..],
        [Action::Detach, Action::ToError, Action::TellPeer(offer)] if offer.qp_nums.is_empty()
    ));
    assert_eq!(handle(&mut endpoint, Input::InError), [Action::AwaitDrain]);
    assert!(handle(&mut endpoint, Input::PeerClosed).is_empty());
    let out = handle(&mut endpoint, Input::Drained);
    assert_eq!(out, [Action::Fenced, Action::Destroy]);
    let out = handle(&mut endpoint, Input::Destroyed);
    assert!(matches!(&out[..], [Action::GiveUp, Action::Closed(_)]));
    assert!(handle(&mut endpoint, Input::Replied(Ok(offer("b", "a", 5)))).is_empty());
}

#[test]
fn without_the_peers_word_the_fence_takes_a_packets_lifetime() {
    let mut endpoint = connected();
    handle(
        &mut endpoint,
        Input::Close(CloseCause::Broken("RETRY_EXC_ERR".into())),
    );
    handle(&mut endpoint, Input::InError);
    endpoint.handle(at(500), Input::Drained);
    assert!(actions(&mut endpoint).is_empty());
    assert_eq!(endpoint.next_timeout(), Some(at(2_500)));
    endpoint.handle_timeout(at(2_499));
    assert!(actions(&mut endpoint).is_empty());
    endpoint.handle_timeout(at(2_500));
    let out = actions(&mut endpoint);
    assert_eq!(out, [Action::Fenced, Action::Destroy]);
    endpoint.handle(at(2_501), Input::Destroyed);
    let out = actions(&mut endpoint);
    assert!(matches!(&out[..], [Action::GiveUp, Action::Closed(_)]));
}

#[test]
fn the_numbers_of_queue_pairs_are_not_free_while_the_peer_may_send_to_them() {
    let mut endpoint = connected();
    handle(&mut endpoint, Input::Close(CloseCause::CutOff));
    handle(&mut endpoint, Input::InError);
    endpoint.handle(at(10), Input::Drained);
    assert!(!actions(&mut endpoint).contains(&Action::Destroy));
    endpoint.handle(at(1_500), Input::PeerClosed);
    let out = actions(&mut endpoint);
    assert_eq!(out, [Action::Fenced, Action::Destroy]);
    assert!(!endpoint.is_closed());
    endpoint.handle(at(1_501), Input::Destroyed);
    assert!(endpoint.is_closed());
}

#[test]
fn queue_pairs_that_had_to_be_destroyed_still_wait_for_the_far_end() {
    let mut endpoint = connected();
    endpoint.handle(at(100), Input::Close(CloseCause::Broken("stuck".into())));
    endpoint.handle_timeout(at(1_100));
    endpoint.handle(at(1_200), Input::Destroyed);
    let out = actions(&mut endpoint);
    assert_eq!(out.last(), Some(&Action::GiveUp), "{out:?}");
    assert_eq!(endpoint.next_timeout(), Some(at(3_200)));
    endpoint.handle_timeout(at(3_200));
    let out = actions(&mut endpoint);
    assert!(matches!(&out[..], [Action::Fenced, Action::Closed(_)]));
}

#[test]
fn a_queue_pair_that_does_not_drain_is_destroyed_after_the_limit() {
    let mut endpoint = connected();
    endpoint.handle(at(100), Input::Close(CloseCause::Broken("stuck".into())));
    actions(&mut endpoint);
    endpoint.handle_timeout(at(1_099));
    assert!(actions(&mut endpoint).is_empty());
    endpoint.handle_timeout(at(1_100));
    assert_eq!(actions(&mut endpoint), [Action::Destroy]);
    endpoint.handle(at(1_200), Input::Drained);
    assert!(actions(&mut endpoint).is_empty(), "destroyed once");
}

#[test]
fn work_that_does_not_come_back_flushed_is_waited_for_from_error_on() {
    let mut endpoint = connected();
    endpoint.handle(at(100), Input::Close(CloseCause::Broken("stuck".into())));
    endpoint.handle(at(400), Input::InError);
    actions(&mut endpoint);
    assert_eq!(endpoint.next_timeout(), Some(at(900)));
    endpoint.handle_timeout(at(900));
    assert_eq!(actions(&mut endpoint), [Action::Destroy]);

    // A process that stood still has not looked whether it came, and looks once more.
    let mut endpoint = connected();
    endpoint.handle(at(100), Input::Close(CloseCause::Broken("stuck".into())));
    endpoint.handle(at(400), Input::InError);
    actions(&mut endpoint);
    endpoint.handle_timeout(at(1_500));
    assert!(actions(&mut endpoint).is_empty());
    assert_eq!(endpoint.next_timeout(), Some(at(2_000)));
    endpoint.handle_timeout(at(2_900));
    assert_eq!(actions(&mut endpoint), [Action::Destroy], "but only once");
}

#[test]
fn queue_pairs_that_cannot_be_destroyed_end_unfenced_unless_they_were_drained() {
    for drained in [false, true] {
        let mut endpoint = connected();
        endpoint.handle(at(100), Input::Close(CloseCause::Broken("stuck".into())));
        endpoint.handle(at(100), Input::PeerClosed);
        if drained {
            endpoint.handle(at(100), Input::InError);
            endpoint.handle(at(1_100), Input::Drained);
        } else {
            endpoint.handle_timeout(at(1_100));
        }
        let out = actions(&mut endpoint);
        assert!(out.contains(&Action::Destroy));
        assert_eq!(out.contains(&Action::Fenced), drained, "{out:?}");
        assert_eq!(endpoint.next_timeout(), Some(at(2_100)));
        endpoint.handle_timeout(at(2_099));
        assert!(actions(&mut endpoint).is_empty());
        endpoint.handle_timeout(at(2_100));
        let out = actions(&mut endpoint);
        let is_unfenced = out.contains(&Action::Unfenced("stuck".into()));
        assert_eq!(is_unfenced, !drained, "{out:?}");
        assert!(matches!(out.last(), Some(Action::Closed(_))), "{out:?}");
        assert!(endpoint.is_closed());
    }
}

#[test]
fn a_peers_request_to_close_is_answered_only_once_our_end_is_in_error() {
    let mut endpoint = connected();
    let close = Offer {
        qp_nums: Vec::new(),
        ..offer("b", "a", 5)
    };
    let out = handle(&mut endpoint, Input::Requested(Token(6), close));
    assert_eq!(out, [Action::Detach, Action::ToError]);
    let out = handle(&mut endpoint, Input::InError);
    assert!(matches!(
        &out[..],
        [Action::Refuse(Token(6), _), Action::AwaitDrain]
    ));
}

#[test]
fn that_a_rerail_peer_closes_is_no_proof_that_its_queue_pairs_have_stopped() {
    let peer_of = |instance: Option<&str>| Offer {
        instance: instance.map(str::to_owned),
        ..offer("b", "a", 5)
    };
    for (instance, proves) in [(Some("b1"), false), (None, true)] {
        let mut endpoint = offered();
        handle(&mut endpoint, Input::Replied(Ok(peer_of(instance))));
        handle(&mut endpoint, Input::Raised(Ok(())));
        handle(&mut endpoint, Input::Acknowledged(Ok(())));
        let close = Offer {
            qp_nums: Vec::new(),
            ..peer_of(instance)
        };
        let out = handle(&mut endpoint, Input::Requested(Token(6), close));
        let asks = out
            .iter()
            .any(|action| matches!(action, Action::TellPeer(_)));
        assert_eq!(asks, !proves, "it is asked back: {out:?}");
        handle(&mut endpoint, Input::InError);
        let out = handle(&mut endpoint, Input::Drained);
        assert_eq!(
            out.contains(&Action::Fenced),
            proves,
            "{instance:?}: {out:?}"
        );
        if !proves {
            let out = handle(&mut endpoint, Input::PeerClosed);
            assert!(out.contains(&Action::Fenced), "its answer does: {out:?}");
        }
    }
}

#[test]
fn a_late_close_of_an_earlier_connection_leaves_the_next_alone() {
    let mut endpoint = offered();
    let own = Offer {
        psn: Some(500),
        ..offer("b", "a", 5)
    };
    let close = |psn: Option<u32>| Offer {
        qp_nums: Vec::new(),
        psn,
        ..offer("b", "a", 5)
    };
    let closed = |token| [Action::Refuse(token, CLOSED.into())];
    let out = handle(&mut endpoint, Input::Requested(Token(1), close(Some(499))));
    assert_eq!(out, closed(Token(1)), "not even while it is made");
    handle(&mut endpoint, Input::Replied(Ok(own)));
    handle(&mut endpoint, Input::Raised(Ok(())));
    handle(&mut endpoint, Input::Acknowledged(Ok(())));
    let out = handle(&mut endpoint, Input::Requested(Token(2), close(Some(499))));
    assert_eq!(out, closed(Token(2)));
    assert!(endpoint.is_connected());
    let mut other = endpoint.clone();
    for (endpoint, psn) in [(&mut endpoint, Some(500)), (&mut other, None)] {
        handle(endpoint, Input::Requested(Token(3), close(psn)));
        assert!(endpoint.is_closing(), "{psn:?}");
    }
}

#[test]
fn h03_an_answer_that_comes_while_the_queue_pairs_are_raised_is_not_lost() {
    let mut early = offered();
    handle(&mut early, Input::Requested(Token(1), offer("b", "a", 5)));
    handle(&mut early, Input::Replied(Ok(offer("b", "a", 5))));
    let out = handle(&mut early, Input::Raised(Ok(())));
    assert!(matches!(
        &out[..],
        [Action::Answer(Token(1), _), Action::Acknowledge(_)]
    ));

    let mut late = offered();
    handle(&mut late, Input::Replied(Ok(offer("b", "a", 5))));
    handle(&mut late, Input::Requested(Token(1), offer("b", "a", 5)));
    let out = handle(&mut late, Input::Raised(Ok(())));
    assert!(matches!(
        &out[..],
        [Action::Answer(Token(1), _), Action::Acknowledge(_)]
    ));
}

#[test]
fn h06_new_queue_pairs_may_have_the_numbers_of_earlier_ones() {
    let from = |psn| Offer {
        psn: Some(psn),
        ..offer("b", "a", 5)
    };
    let mut endpoint = offered();
    handle(&mut endpoint, Input::Replied(Ok(from(7))));
    handle(&mut endpoint, Input::Raised(Ok(())));
    handle(&mut endpoint, Input::Acknowledged(Ok(())));
    // The same request once more, and late.
    let again = handle(&mut endpoint, Input::Requested(Token(1), from(7)));
    assert!(
        matches!(&again[..], [Action::Answer(Token(1), _)]),
        "{again:?}"
    );
    let rebuilt = handle(&mut endpoint, Input::Requested(Token(2), from(8)));
    assert!(
        rebuilt.contains(&Action::PassOn(Token(2), from(8))),
        "{rebuilt:?}"
    );
    assert_eq!(endpoint.close_cause(), Some(&CloseCause::PeerRebuilt));
}

#[test]
fn late_ready_acknowledgements_connect_nothing_and_say_why() {
    let ack = |first_qp| Offer {
        ready_ack: Some(true),
        ..offer("b", "a", first_qp)
    };
    let refusal = |out: &[Action]| match out {
        [Action::Refuse(_, reason)] => reason.clone(),
        _ => panic!("not refused: {out:?}"),
    };
    let mut endpoint = connected();
    let out = handle(&mut endpoint, Input::Requested(Token(1), ack(3)));
    assert!(refusal(&out).contains("other queue pairs"), "{out:?}");
    assert!(endpoint.is_connected(), "the next connection stays");
    // One that is repeated is answered again, and attaches nothing twice.
    let out = handle(&mut endpoint, Input::Requested(Token(2), ack(5)));
    assert!(matches!(&out[..], [Action::Answer(Token(2), _)]), "{out:?}");

    handle(&mut endpoint, Input::Close(CloseCause::CutOff));
    let out = handle(&mut endpoint, Input::Requested(Token(3), ack(5)));
    assert!(refusal(&out).contains("not connected"), "{out:?}");

    let mut endpoint = offered();
    let out = handle(&mut endpoint, Input::Requested(Token(4), ack(5)));
    assert!(refusal(&out).contains("not connected"), "{out:?}");
    assert!(!endpoint.is_connected());
}

#[test]
fn replies_that_come_late_change_nothing() {
    // To a request that was given up: before and after its queue pairs are gone.
    let mut endpoint = offered();
    handle(&mut endpoint, Input::Close(CloseCause::CutOff));
    let late = || Input::Replied(Ok(offer("b", "a", 5)));
    assert!(handle(&mut endpoint, late()).is_empty());
    handle(&mut endpoint, Input::InError);
    handle(&mut endpoint, Input::Destroyed);
    assert!(endpoint.is_closed());
    assert!(handle(&mut endpoint, late()).is_empty());
    let refused = Input::Replied(Err(refused("too many endpoints")));
    assert!(handle(&mut endpoint, refused).is_empty());
    assert!(handle(&mut endpoint, Input::Acknowledged(Ok(()))).is_empty());
    assert!(endpoint.is_closed(), "nothing brings it back");

    // To an acknowledgement: that of an endpoint that was cut meanwhile attaches nothing.
    let mut endpoint = offered();
    handle(&mut endpoint, late());
    handle(&mut endpoint, Input::Raised(Ok(())));
    handle(&mut endpoint, Input::Close(CloseCause::CutOff));
    assert!(handle(&mut endpoint, Input::Acknowledged(Ok(()))).is_empty());
    assert!(!endpoint.is_connected());
}

#[test]
fn closes_that_cross_fence_both_ends_by_each_others_word() {
    // Each end tells the other, and has the other's request before an answer to its own.
    let peer = |offer: Offer, instance: &str| Offer {
        instance: Some(instance.to_owned()),
        ..offer
    };
    let (to_a, to_b) = (
        peer(offer("b", "a", 5), "b1"),
        peer(offer("a", "b", 1), "a1"),
    );
    let close_of = |offer: &Offer| Offer {
        qp_nums: Vec::new(),
        ready_ack: None,
        ..offer.clone()
    };
    let mut a = offered();
    handle(&mut a, Input::Replied(Ok(to_a.clone())));
    handle(&mut a, Input::Raised(Ok(())));
    handle(&mut a, Input::Acknowledged(Ok(())));
    let mut b = endpoint("b", "a");
    handle(&mut b, Input::Requested(Token(1), to_b.clone()));
    handle(&mut b, Input::Prepared(Ok(ends(5))));
    handle(&mut b, Input::Raised(Ok(())));
    let ack = Offer {
        ready_ack: Some(true),
        ..to_b.clone()
    };
    handle(&mut b, Input::Requested(Token(2), ack));
    assert!(a.is_connected() && b.is_connected());

    for end in [&mut a, &mut b] {
        let out = handle(end, Input::Close(CloseCause::CutOff));
        let tells = out.iter().filter(|of| matches!(of, Action::TellPeer(_)));
        assert_eq!(tells.count(), 1, "{out:?}");
    }
    for (end, request) in [(&mut a, close_of(&to_a)), (&mut b, close_of(&to_b))] {
        let out = handle(end, Input::Requested(Token(9), request));
        assert!(out.is_empty(), "not before it is in ERR: {out:?}");
        let out = handle(end, Input::InError);
        assert!(
            matches!(&out[..], [Action::Refuse(Token(9), reason), Action::AwaitDrain]
                if reason == CLOSED),
            "{out:?}"
        );
        let out = handle(end, Input::Drained);
        assert!(!out.contains(&Action::Fenced), "only half: {out:?}");
    }
    for end in [&mut a, &mut b] {
        // The other's answer to our own request.
        let out = handle(end, Input::PeerClosed);
        assert_eq!(out, [Action::Fenced, Action::Destroy]);
        let out = handle(end, Input::Destroyed);
        assert!(matches!(out.last(), Some(Action::Closed(_))), "{out:?}");
        assert!(end.is_closed());
    }
}
