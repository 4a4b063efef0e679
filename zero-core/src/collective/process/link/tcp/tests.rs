use std::net::TcpListener;

use super::*;

const LIMIT: Duration = Duration::from_secs(20);

fn pair() -> (TcpLink, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (here, _) = listener.accept().unwrap();
    (TcpLink::new(vec![None, Some(here)], None).unwrap(), there)
}

fn links() -> (TcpLink, TcpLink) {
    let (a, there) = pair();
    (a, TcpLink::new(vec![Some(there), None], None).unwrap())
}

/// Sends bytes that the caller keeps alive.
fn send(link: &mut TcpLink, channel: Channel, to: usize, tag: i32, bytes: &[u8]) -> Ongoing {
    // SAFETY: every test here keeps its bytes until its link is dropped.
    unsafe { link.send(channel, to, tag, bytes).unwrap() }
}

/// Receives into memory that the caller keeps alive.
fn receive(link: &mut TcpLink, from: usize, tag: i32, to: &mut [u8]) -> Ongoing {
    // SAFETY: as in `send`; no test looks at the memory before the receive has ended.
    unsafe { link.receive(from, tag, to.as_mut_ptr(), to.len()).unwrap() }
}

fn next(link: &mut TcpLink, other: Option<&mut TcpLink>) -> Heard {
    let end = Instant::now() + LIMIT;
    let mut other = other;
    while Instant::now() < end {
        if let Some(other) = other.as_deref_mut() {
            assert!(other.next_message().unwrap().is_none());
        }
        if let Some(heard) = link.next_message().unwrap() {
            return heard;
        }
    }
    panic!("nothing was heard");
}

fn message(heard: Heard) -> Vec<u8> {
    match heard {
        Heard::Message { bytes, .. } => bytes,
        Heard::Lost { reason, .. } => panic!("{reason}"),
        Heard::Connected { peer } => panic!("rank {peer} has connected"),
    }
}

#[test]
fn a_payload_that_nobody_has_posted_stops_no_message() {
    let (mut a, mut b) = links();
    let payload: Vec<u8> = (0..30_000_000_usize).map(|i| (i % 251) as u8).collect();
    let mut outgoing = send(&mut a, Channel::Data, 1, 7, &payload);
    let words = [b"first".to_vec(), vec![3; 100_000], Vec::new()];
    let mut said: Vec<Ongoing> = words.iter().map(|word| send(&mut a, Channel::Control, 1, 0, word)).collect();
    for word in &words {
        assert_eq!(message(next(&mut b, Some(&mut a))), *word);
    }
    assert!(said.iter_mut().all(|said| a.test(said).unwrap().is_some()));
    assert!(a.test(&mut outgoing).unwrap().is_none());
    let mut room = vec![0; payload.len()];
    let mut incoming = receive(&mut b, 0, 7, &mut room);
    while b.test(&mut incoming).unwrap().is_none() {
        assert!(a.next_message().unwrap().is_none() && b.next_message().unwrap().is_none());
    }
    assert_eq!(b.test(&mut incoming).unwrap(), Some(payload.len()));
    assert!(a.test(&mut outgoing).unwrap().is_some() && room == payload);
}

#[test]
fn both_ways_at_once_and_pieces_in_order() {
    let (mut a, mut b) = links();
    let pieces: Vec<Vec<u8>> = (0..40_u8).map(|i| vec![i; 300_000 + usize::from(i)]).collect();
    let mut rooms: Vec<Vec<u8>> = pieces.iter().chain(&pieces).map(|piece| vec![0; piece.len()]).collect();
    let mut sends = Vec::new();
    for piece in &pieces {
        sends.push(send(&mut a, Channel::Data, 1, 3, piece));
        sends.push(send(&mut b, Channel::Data, 0, 3, piece));
    }
    let (to_a, to_b) = rooms.split_at_mut(pieces.len());
    let mut receives: Vec<Ongoing> = to_a.iter_mut().map(|room| receive(&mut a, 1, 3, room)).collect();
    receives.extend(to_b.iter_mut().map(|room| receive(&mut b, 0, 3, room)));
    let end = Instant::now() + LIMIT;
    while sends.iter().chain(&receives).any(|ongoing| ongoing.0.get().is_none()) {
        assert!(Instant::now() < end);
        assert!(a.next_message().unwrap().is_none() && b.next_message().unwrap().is_none());
    }
    assert!(rooms.iter().zip(pieces.iter().chain(&pieces)).all(|(room, piece)| room == piece));
}

#[test]
fn an_end_is_told_after_what_was_said_and_ends_what_was_to_be_sent() {
    let (mut a, mut b) = links();
    let payload = vec![1; 1000];
    let mut unsent = send(&mut b, Channel::Data, 0, 1, &payload);
    let word = send(&mut a, Channel::Control, 1, 0, &payload);
    assert!(a.next_message().unwrap().is_none() && word.0.get().is_some());
    drop(a);
    assert_eq!(message(next(&mut b, None)), payload);
    let Heard::Lost { peer, reason } = next(&mut b, None) else { panic!("more was heard than said") };
    assert!(peer == 0 && reason.starts_with("its connection ended; check whether its process"), "{reason}");
    assert!(b.test(&mut unsent).unwrap().is_some());
    let mut later = send(&mut b, Channel::Control, 0, 0, &payload);
    assert!(b.test(&mut later).unwrap().is_some() && b.next_message().unwrap().is_none());
}

#[test]
fn frames_of_no_kind_end_the_connection() {
    use std::io::Write;

    for (kind, tag, length) in [(9_u32, 0_i32, 4_u64), (0, 0, 1 << 40), (1, 5, 4), (1, 6, 5), (u32::MAX, -1, u64::MAX)]
    {
        let (mut link, mut there) = pair();
        let mut room = vec![0; 4];
        receive(&mut link, 1, 6, &mut room);
        let head = [&kind.to_le_bytes()[..], &tag.to_le_bytes(), &length.to_le_bytes(), &[0; 8]].concat();
        there.write_all(&head).unwrap();
        let Heard::Lost { reason, .. } = next(&mut link, None) else { panic!("a frame of kind {kind} was taken") };
        assert!(reason.contains("same build"), "{reason}");
        assert_eq!(room, [0; 4]);
    }
}

#[test]
fn closing_waits_for_the_other_end_only_so_long() {
    let (a, b) = links();
    let other = std::thread::spawn(|| {
        let (link, there) = pair();
        (link.close().is_ok(), there)
    });
    // Links stay on one thread: the two ends of `a` and `b` close one after the other.
    let begin = Instant::now();
    drop(b);
    a.close().unwrap();
    assert!(begin.elapsed() < CLOSE);
    assert!(other.join().unwrap().0);
}
