//! The communication thread (`rank-N-link`), the only one that uses the link to the other ranks.
//!
//! It receives commands from the rank's other threads and messages from the other ranks, and matches them. An
//! exchange is *announced* to the ranks that take part by a control message, with its payload inside or in transit.
//! Another rank's announcement is *early* until this rank has reached the same operation; only then does the thread compare
//! the descriptions and post the payload's receive. This thread owns buffers for as long as the link may access them, so that
//! an abandoned operation leaves no dangling pointers.
//!
//! The link makes progress only while it is called, so the thread polls: without a pause while a payload is coming in, and
//! with growing naps otherwise ([`nap`]). A command ends a nap at once.

mod news;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::super::DType;
use super::super::landing::{Landing, chunks};
use super::super::operation::OperationContext;
use super::super::rounds::{self, Node};
use super::commands::{Asked, Command, Exchange, Exposed, Got, Job, Read, Share};
use super::link::{Channel, Heard, Link, MAX_TAG};
use super::message::{Answer, End, INLINE, Message, Payload, Slot, Who};
use super::shared::Shared;
use super::traffic::{For, Given, Held, Incoming, Outgoing, Underway, nap, take_ended};
use crate::CommError;
use crate::collective::error::LinkError;
use news::Ends;

/// Longest nap of a thread that its link wakes.
const LONGEST_NAP: Duration = Duration::from_millis(100);

/// An exchange in progress.
struct Active {
    exchange: Exchange,
    /// Ranks that have not announced it.
    missing: Vec<usize>,
    /// Number of chunks in transit, per rank with any.
    receiving: HashMap<usize, usize>,
    /// Number of chunks of the input still to be sent before it ends.
    sending: usize,
}

struct Fetch {
    read: Read,
    tag: String,
    landing: Option<Arc<Landing>>,
    pieces: usize,
}

impl Fetch {
    /// Releases this thread's reference to the memory, then passes the result to the waiter.
    fn end(self, outcome: Result<(), CommError>) {
        let Self { read: Read { reply, into, .. }, tag, landing, .. } = self;
        drop(into);
        let _ = reply.send(outcome.map(|()| Got { tag, bytes: landing }));
    }
}

/// An operation that another rank has announced before this one has reached it.
struct Early {
    from: usize,
    op: String,
    payload: Payload,
}

pub(super) struct Pump<L: Link> {
    // Dropped before the memory that it may still read and write.
    link: L,
    shared: Arc<Shared>,
    inbox: Receiver<Command>,
    chunk: usize,
    active: HashMap<Slot, Active>,
    early: HashMap<Slot, Vec<Early>>,
    reads: HashMap<u64, Fetch>,
    underway: Underway<L::Ongoing>,
    next_tag: i32,
    /// The ranks that this one notifies of its failure and its end: its neighbours, and those that the link was asked to connect
    /// with, which would take the end of the connection for a failure.
    near: Vec<usize>,
    /// This rank's node in the tree that collects the ranks' ends.
    tree: Node,
    /// Indexed by [`End`].
    ends: [Ends; 2],
    /// By group, a member that has ended while others still call operations.
    absent: HashMap<u64, usize>,
    /// By rank, `true` if the connection to it has ended.
    lost: Vec<bool>,
    aborted: bool,
    ending: Option<(bool, Instant)>,
}

impl<L: Link> Pump<L> {
    pub(super) fn new(link: L, shared: Arc<Shared>, inbox: Receiver<Command>, chunk: usize) -> Self {
        let place = &shared.state.place;
        let (near, tree, lost) = (
            rounds::neighbours(place.rank, place.world),
            rounds::node(place.rank, 0, place.world),
            vec![false; place.world],
        );
        Self {
            link,
            shared,
            inbox,
            chunk,
            active: HashMap::new(),
            early: HashMap::new(),
            reads: HashMap::new(),
            underway: Underway::default(),
            next_tag: 0,
            near,
            ends: [Ends { own: false, branches: tree.children.len() }; 2],
            tree,
            absent: HashMap::new(),
            lost,
            aborted: false,
            ending: None,
        }
    }

    /// Runs until [`Command::Finish`]. Returns `true` if it closed the link cleanly, or the link's error.
    pub(super) fn run(mut self) -> Result<bool, LinkError> {
        let mut active = Instant::now();
        loop {
            match self.turn() {
                Ok(true) => active = Instant::now(),
                Ok(false) => {}
                Err(error) => {
                    self.shared.fail(&error.to_string(), None);
                    self.stop_waits();
                    return Err(error);
                }
            }
            if let Some((finalize, until)) = self.ending
                && (self.is_quiet() || Instant::now() >= until)
            {
                let sound = self.shared.state.standing.trouble().is_none() && self.is_quiet();
                self.stop_waits();
                return if finalize && sound { self.link.close().map(|()| true) } else { Ok(false) };
            }
            let nap = nap(active.elapsed(), self.moves(), self.expects());
            if L::WAKES {
                std::thread::park_timeout(LONGEST_NAP);
            } else if nap.is_zero() {
                std::thread::yield_now();
            } else {
                // A command that arrived since the last check has unparked this thread: then this returns at once.
                std::thread::park_timeout(nap);
            }
        }
    }

    /// Returns `true` if the link has finished all transfers.
    fn is_quiet(&self) -> bool {
        self.underway.outgoing.is_empty() && self.underway.incoming.is_empty()
    }

    /// Returns `true` if a payload is in transit: an incoming one, or an outgoing one whose receiver has reached the operation.
    fn moves(&self) -> bool {
        let wanted = |Given { what, .. }: &Given<L::Ongoing, Outgoing>| match (&what.held, what.slot) {
            (Held::Message(_), _) => false,
            (_, None) => true,
            (_, Some(slot)) => self.active.get(&slot).is_none_or(|active| !active.missing.contains(&what.to)),
        };
        !self.underway.incoming.is_empty() || self.underway.outgoing.iter().any(wanted)
    }

    /// Returns `true` if any exchange, read or send is incomplete.
    fn expects(&self) -> bool {
        !self.active.is_empty() || !self.reads.is_empty() || !self.underway.outgoing.is_empty()
    }

    /// Does all work that is possible now; returns `true` if there was any.
    fn turn(&mut self) -> Result<bool, LinkError> {
        let mut busy = false;
        while let Ok(command) = self.inbox.try_recv() {
            self.obey(command)?;
            busy = true;
        }
        while let Some(heard) = self.link.next_message()? {
            match heard {
                Heard::Message { from, bytes } => match Message::decode(&bytes) {
                    Ok(message) => self.hear(from, message)?,
                    Err(error) => self.shared.fail(&format!("rank {from} sent {error}"), None),
                },
                Heard::Connected { peer } => self.come_near(peer)?,
                Heard::Lost { peer, reason } => self.lose(peer, &reason),
            }
            busy = true;
        }
        busy |= self.test()?;
        Ok(busy)
    }

    fn obey(&mut self, command: Command) -> Result<(), LinkError> {
        match command {
            Command::Exchange(exchange) => self.begin(exchange)?,
            Command::Read(read) => {
                let (id, window, key, peer) = (read.id, read.window, read.key, read.peer);
                if self.lost[peer] {
                    self.shared.blame(peer, "it has ended, and the data that it published is no longer available");
                }
                let sound = self.shared.state.standing.check(read.at(self.shared.rank()), []);
                self.reads.insert(id, Fetch { read, tag: String::new(), landing: None, pieces: 0 });
                match sound {
                    Ok(()) => self.say(peer, &Message::Read { id, window, key })?,
                    error => self.end_read(id, error),
                }
            }
            Command::Serve { to, id, answer } => {
                let answer = match answer {
                    Answer::Gone => Answer::Gone,
                    Answer::Left => Answer::Left,
                    Answer::Failed(reason) => Answer::Failed(reason),
                    Answer::Ready { tag, payload } => return self.send_exposed(to, id, tag, payload),
                };
                self.say(to, &Message::ReadValue { id, answer })?;
            }
            Command::Abort => {
                if let Some(trouble) = self.shared.state.standing.trouble() {
                    self.abort(trouble)?;
                }
                self.stop_waits();
            }
            Command::Leave => {
                self.shared.state.standing.leave(self.shared.rank());
                // The serving thread runs until this one has ended.
                let _ = self.shared.jobs.send(Job::Left);
                for (Slot { group, .. }, early) in std::mem::take(&mut self.early) {
                    early.iter().try_for_each(|early| self.say(early.from, &Message::Absent { group }))?;
                }
                self.come_to(End::Part)?;
            }
            Command::Done => {
                self.shared.state.standing.note_done(self.shared.rank());
                self.come_to(End::Process)?;
            }
            Command::Finish { finalize, within } => self.ending = Some((finalize, Instant::now() + within)),
        }
        Ok(())
    }

    fn hear(&mut self, from: usize, message: Message) -> Result<(), LinkError> {
        match message {
            Message::Arrived { slot, op, payload } => {
                let early = Early { from, op, payload };
                match self.active.contains_key(&slot) {
                    true => self.meet(slot, early)?,
                    // The sender waits for this rank, or for ranks that do.
                    false if self.ends[End::Part as usize].own => {
                        self.say(from, &Message::Absent { group: slot.group })?
                    }
                    false => self.come_early(slot, early),
                }
            }
            Message::Read { id, window, key } => {
                let _ = self.shared.jobs.send(Job::Asked(Asked { from, id, window, key }));
            }
            Message::ReadValue { id, answer } => self.see(id, answer)?,
            Message::Abort(trouble) => {
                self.abort(trouble.clone())?;
                // The flight record must show this rank's operations before the failure ends them.
                self.shared.note(trouble);
                self.stop_waits();
            }
            Message::Ended { end: End::Process, who: Who::Sender } => self.shared.state.standing.note_done(from),
            Message::Ended { end: End::Part, who: Who::Sender } => {
                self.shared.state.standing.leave(from);
                self.end_exchanges(from, |_, active| active.missing.contains(&from));
            }
            Message::Ended { end, who: Who::Branch } => {
                let branches = &mut self.ends[end as usize].branches;
                *branches = branches.saturating_sub(1);
                self.end_branch(end)?;
            }
            Message::Ended { end, who: Who::All } => self.all_ended(end)?,
            Message::Absent { group } => {
                self.shared.state.standing.leave(from);
                self.absent.entry(group).or_insert(from);
                self.end_exchanges(from, |slot, _| slot.group == group);
            }
        }
        Ok(())
    }

    /// Keeps an early announcement, unless this rank is in a different operation with the same number.
    fn come_early(&mut self, slot: Slot, early: Early) {
        let at = (slot.group, slot.seq);
        let unlike = self.active.iter().find(|(of, active)| (of.group, of.seq) == at && active.exchange.op != early.op);
        match unlike.map(|(of, _)| *of) {
            Some(of) => self.mismatch(of, early.from, early.op),
            None => self.early.entry(slot).or_default().push(early),
        }
    }

    /// Ends an exchange, and the run, because another rank has called a different operation.
    fn mismatch(&mut self, slot: Slot, from: usize, other_op: String) {
        let exchange = self.active.remove(&slot).expect("the caller has found it").exchange;
        let error = exchange.at(self.shared.rank()).mismatch(from, other_op);
        self.shared.fail(&error.to_string(), Some(&error));
        let first = self.shared.state.standing.check(exchange.at(self.shared.rank()), []);
        exchange.end(first);
    }

    /// Announces an exchange, and processes early announcements of it.
    fn begin(&mut self, exchange: Exchange) -> Result<(), LinkError> {
        let slot = exchange.slot;
        let early = self.early.remove(&slot).unwrap_or_default();
        let missing: Vec<usize> = exchange.receives.iter().map(|receive| receive.peer).collect();
        let absent = missing.iter().copied().filter(|&peer| early.iter().all(|early| early.from != peer));
        let absent = absent.chain(self.absent.get(&slot.group).copied());
        let sound = self.shared.state.standing.check(exchange.at(self.shared.rank()), absent);
        if sound.is_err() {
            exchange.end(sound);
            return Ok(());
        }
        let mut sending = 0;
        for Share { peer: to, bytes } in &exchange.sends {
            let payload = &exchange.input.as_bytes()[bytes.clone()];
            let (announced, tag) = self.announce_payload(payload);
            self.say(*to, &Message::Arrived { slot, op: exchange.op.clone(), payload: announced })?;
            if let Some(tag) = tag {
                let input = exchange.input.clone();
                sending += self.send_payload(*to, tag, payload, Some(slot), || Held::Input(input.clone()))?;
            }
        }
        let sending = if exchange.until_sent { sending } else { 0 };
        // All phases of one operation have its description, so that a mismatch is found in any phase, also for a broadcast.
        let others = self.early.iter().filter(|(of, _)| (of.group, of.seq) == (slot.group, slot.seq));
        let unlike = others.flat_map(|(_, early)| early).find(|early| early.op != exchange.op);
        let unlike = unlike.map(|early| (early.from, early.op.clone()));
        self.active.insert(slot, Active { exchange, missing, receiving: HashMap::new(), sending });
        if let Some((from, op)) = unlike {
            self.mismatch(slot, from, op);
        }
        for early in early {
            self.meet(slot, early)?;
        }
        self.end_if_complete(slot);
        Ok(())
    }

    /// Compares another rank's announcement with this rank's operation, and takes its payload.
    fn meet(&mut self, slot: Slot, early: Early) -> Result<(), LinkError> {
        // An early announcement that did not match has ended the exchange.
        let Some(active) = self.active.get_mut(&slot) else { return Ok(()) };
        let Early { from, op, payload } = early;
        let exchange = &active.exchange;
        let receive = exchange.receives.iter().find(|receive| receive.peer == from);
        let expected = receive.map_or(0, |receive| receive.bytes.len());
        if op != exchange.op || receive.is_none() || payload.bytes() != expected {
            let other_op = if op == exchange.op { format!("{op} with {} bytes", payload.bytes()) } else { op };
            self.mismatch(slot, from, other_op);
            return Ok(());
        }
        let Share { bytes, .. } = receive.expect("checked above");
        let (landing, bytes) = (exchange.landing.clone(), bytes.clone());
        active.missing.retain(|&peer| peer != from);
        exchange.entry.arrived(from, matches!(payload, Payload::Follows { .. }));
        match payload {
            // SAFETY: this range of the landing belongs to this announcement alone, which arrives once.
            Payload::Inline(inline) => unsafe { landing.fill(bytes.start, &inline) },
            Payload::Follows { tag, .. } => {
                let pieces = self.receive_payload(from, tag, &landing, bytes, For::Exchange(slot, from))?;
                let active = self.active.get_mut(&slot).expect("posting receives ends no exchange");
                active.receiving.insert(from, pieces);
            }
        }
        // The waiter must be the only owner of the memory when the exchange ends.
        drop(landing);
        self.end_if_complete(slot);
        Ok(())
    }

    fn end_if_complete(&mut self, slot: Slot) {
        let complete =
            |active: &Active| active.missing.is_empty() && active.receiving.is_empty() && active.sending == 0;
        if self.active.get(&slot).is_some_and(complete)
            && let Some(active) = self.active.remove(&slot)
        {
            active.exchange.end(Ok(()));
        }
    }

    /// Processes an owner's answer.
    fn see(&mut self, id: u64, answer: Answer<Payload>) -> Result<(), LinkError> {
        // The read has failed in the meantime: its payload is not received.
        let Some(Fetch { read, .. }) = self.reads.get(&id) else { return Ok(()) };
        let (peer, rank) = (read.peer, self.shared.rank());
        let error = match answer {
            Answer::Ready { tag, payload } => return self.see_value(id, tag, payload),
            Answer::Gone => CommError::Gone { rank, what: read.what.clone(), peer },
            Answer::Left => read.at(rank).left(peer),
            Answer::Failed(reason) => read.at(rank).failed(peer, reason.into()),
        };
        self.end_read(id, Err(error));
        Ok(())
    }

    /// Receives the requested value.
    fn see_value(&mut self, id: u64, tag: String, payload: Payload) -> Result<(), LinkError> {
        let Some(fetch) = self.reads.get_mut(&id) else { return Ok(()) };
        fetch.tag = tag;
        let (read, size) = (&fetch.read, payload.bytes());
        let peer = read.peer;
        read.entry.arrived(peer, true);
        let fresh = || (Arc::new(Landing::new(DType::U8, size)), 0..size);
        let (landing, range, purpose) = match &read.into {
            Some((landing, range)) if range.len() == size => (landing.clone(), range.clone(), For::Read(id)),
            Some((_, range)) => {
                let op = format!("{} ({} bytes)", read.op, range.len());
                let at = OperationContext { op: &op, ..read.at(self.shared.rank()) };
                let error = at.mismatch(peer, format!("a publication of {} ({size} bytes)", fetch.tag));
                self.end_read(id, Err(error));
                // Its owner is sending it, and can end only after it has been received.
                let (landing, range) = fresh();
                (landing, range, For::Nobody)
            }
            None => {
                let (landing, range) = fresh();
                fetch.landing = Some(landing.clone());
                (landing, range, For::Read(id))
            }
        };
        match payload {
            Payload::Inline(bytes) => {
                // SAFETY: the range belongs to this read alone.
                unsafe { landing.fill(range.start, &bytes) }
                drop(landing);
                self.end_read(id, Ok(()));
            }
            Payload::Follows { tag, .. } => {
                let pieces = self.receive_payload(peer, tag, &landing, range, purpose)?;
                if let Some(fetch) = self.reads.get_mut(&id) {
                    fetch.pieces = pieces;
                }
            }
        }
        Ok(())
    }

    fn end_read(&mut self, id: u64, outcome: Result<(), CommError>) {
        if let Some(fetch) = self.reads.remove(&id) {
            fetch.end(outcome);
        }
    }

    /// Ends every wait of this rank with the run's failure.
    fn stop_waits(&mut self) {
        for (_, Active { exchange, .. }) in self.active.drain() {
            let error = Err(self.shared.stopped(exchange.at(self.shared.rank())));
            exchange.end(error);
        }
        for (_, fetch) in self.reads.drain() {
            let error = Err(self.shared.stopped(fetch.read.at(self.shared.rank())));
            fetch.end(error);
        }
    }

    /// Processes the transfers that the link has finished.
    fn test(&mut self) -> Result<bool, LinkError> {
        let sent = take_ended(&mut self.link, &mut self.underway.outgoing)?;
        let come = take_ended(&mut self.link, &mut self.underway.incoming)?;
        let busy = !sent.is_empty() || !come.is_empty();
        for (Outgoing { held, slot, .. }, _) in sent {
            if let Held::Exposed(exposed) = held {
                dispose(&self.shared.jobs, exposed);
            }
            if let Some(slot) = slot
                && let Some(active) = self.active.get_mut(&slot)
                && active.sending > 0
            {
                active.sending -= 1;
                self.end_if_complete(slot);
            }
        }
        for (Incoming { bytes: expected, landing, purpose }, bytes) in come {
            drop(landing);
            match bytes == expected {
                true => self.landed(purpose),
                false => self.shared.fail(&format!("received {bytes} bytes, but {expected} were announced"), None),
            }
        }
        Ok(busy)
    }

    /// Processes a received chunk.
    fn landed(&mut self, purpose: For) {
        match purpose {
            For::Exchange(slot, from) => {
                // Nobody waits for the chunk if the exchange has ended.
                let Some(active) = self.active.get_mut(&slot) else { return };
                if let Some(pieces) = active.receiving.get_mut(&from) {
                    *pieces -= 1;
                    if *pieces == 0 {
                        active.receiving.remove(&from);
                        active.exchange.entry.received(from);
                    }
                }
                self.end_if_complete(slot);
            }
            For::Read(id) => {
                let Some(fetch) = self.reads.get_mut(&id) else { return };
                fetch.pieces -= 1;
                if fetch.pieces == 0 {
                    self.end_read(id, Ok(()));
                }
            }
            For::Nobody => {}
        }
    }

    // ---- messages and payloads in transit ----

    /// Returns the announcement of a payload and, unless that contains it, the tag under which to send it.
    fn announce_payload(&mut self, bytes: &[u8]) -> (Payload, Option<i32>) {
        if bytes.len() <= INLINE {
            return (Payload::Inline(bytes.to_vec()), None);
        }
        let tag = self.next_tag;
        // One pair of ranks has far fewer payloads in transit at a time than there are tags.
        self.next_tag = (tag + 1) % MAX_TAG;
        (Payload::Follows { bytes: bytes.len() as u64, tag }, Some(tag))
    }

    fn say(&mut self, to: usize, message: &Message) -> Result<(), LinkError> {
        let bytes = message.encode();
        // SAFETY: the vector is kept, unmoved on the heap, until the send has ended.
        let ongoing = unsafe { self.link.send(Channel::Control, to, 0, &bytes) }?;
        let what = Outgoing { held: Held::Message(bytes), to, slot: None };
        self.underway.outgoing.push(Given { ongoing, what });
        Ok(())
    }

    /// Starts sending a payload; returns the number of chunks.
    fn send_payload(
        &mut self,
        to: usize,
        tag: i32,
        bytes: &[u8],
        slot: Option<Slot>,
        held: impl Fn() -> Held,
    ) -> Result<usize, LinkError> {
        let mut pieces = 0;
        for range in chunks(bytes.len(), self.chunk) {
            let piece = &bytes[range];
            // SAFETY: `held` keeps the bytes in place, and nobody writes to them, until the send has ended.
            let ongoing = unsafe { self.link.send(Channel::Data, to, tag, piece) }?;
            self.underway.outgoing.push(Given { ongoing, what: Outgoing { held: held(), to, slot } });
            pieces += 1;
        }
        Ok(pieces)
    }

    fn send_exposed(&mut self, to: usize, id: u64, tag: String, exposed: Exposed) -> Result<(), LinkError> {
        let bytes = (*exposed).as_ref();
        let (payload, data_tag) = self.announce_payload(bytes);
        self.say(to, &Message::ReadValue { id, answer: Answer::Ready { tag, payload } })?;
        match data_tag {
            Some(data_tag) => {
                self.send_payload(to, data_tag, bytes, None, || Held::Exposed(exposed.clone()))?;
            }
            None => dispose(&self.shared.jobs, exposed),
        }
        Ok(())
    }

    /// Posts the receives of a payload; returns their number.
    fn receive_payload(
        &mut self,
        from: usize,
        tag: i32,
        landing: &Arc<Landing>,
        range: core::ops::Range<usize>,
        purpose: For,
    ) -> Result<usize, LinkError> {
        let mut pieces = 0;
        for piece in chunks(range.len(), self.chunk) {
            let piece = range.start + piece.start..range.start + piece.end;
            // SAFETY: the landing is kept until the receive has ended, and this range of it belongs to this payload alone.
            let ongoing = unsafe { self.link.receive(from, tag, landing.target(&piece), piece.len()) }?;
            let what = Incoming { bytes: piece.len(), landing: landing.clone(), purpose };
            self.underway.incoming.push(Given { ongoing, what });
            pieces += 1;
        }
        Ok(pieces)
    }
}

fn dispose(jobs: &Sender<Job>, exposed: Exposed) {
    // When the serving thread has ended, the value is dropped here.
    let _ = jobs.send(Job::Dispose(exposed));
}
