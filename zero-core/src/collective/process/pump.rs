//! The communication thread (`rank-N-link`): it alone uses the link to the other ranks.
//!
//! It takes commands from the rank's other threads and messages from the other ranks, and brings them together. An
//! exchange is *announced* to every other rank of its group by a control message, with its payload inside or on its way.
//! What another rank announces is *early* until this rank has come to the same operation; only then are its words
//! compared and its payload's receive posted. Buffers belong to this thread for as long as the link may touch them, so that
//! an operation that is given up leaves nothing dangling.
//!
//! The link makes progress only while it is called. So the thread polls: without a pause while a payload is coming in, and
//! with naps that grow otherwise ([`Idle`]); a command ends a nap at once.

mod payload;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Receiver;

use payload::dispose;

use super::super::DType;
use super::super::landing::Landing;
use super::commands::{Asked, Command, Exchange, Got, Job, Read, ReceiveFrom, SendTo, Served};
use super::link::{Heard, Link};
use super::message::{Answer, Message, Payload, Slot};
use super::shared::{At, Shared};
use super::traffic::{For, Held, Idle, Incoming, Outgoing, Underway};
use crate::CommError;
use crate::error::LinkError;

/// An exchange under way.
struct Active {
    exchange: Exchange,
    /// Ranks that have not announced it.
    missing: Vec<usize>,
    /// Per rank with pieces on the way, how many.
    receiving: HashMap<usize, usize>,
    /// Pieces of the input that are to be sent before it ends.
    sending: usize,
}

struct Reading {
    read: Read,
    tag: String,
    landing: Option<Arc<Landing>>,
    pieces: usize,
}

/// What another rank has announced before this one has come to it.
struct Early {
    from: usize,
    op: String,
    payload: Payload,
}

pub(super) struct Pump<L: Link> {
    // Dropped before what it may still read and write.
    link: L,
    shared: Arc<Shared>,
    inbox: Receiver<Command>,
    chunk: usize,
    active: HashMap<Slot, Active>,
    early: HashMap<Slot, Vec<Early>>,
    reads: HashMap<u64, Reading>,
    underway: Underway<L::Ongoing>,
    next_tag: i32,
    /// Ranks to which there is no connection any more.
    lost: Vec<bool>,
    aborted: bool,
    ending: Option<(bool, Instant)>,
}

impl<L: Link> Pump<L> {
    pub(super) fn new(link: L, shared: Arc<Shared>, inbox: Receiver<Command>, chunk: usize) -> Self {
        let lost = vec![false; shared.place.world];
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
            lost,
            aborted: false,
            ending: None,
        }
    }

    /// Runs until it is told to finish; gives the link's error, if it came to one. Whether the link was ended well.
    pub(super) fn run(mut self) -> Result<bool, LinkError> {
        let mut idle = Idle::new();
        loop {
            match self.turn() {
                Ok(true) => idle.reset(),
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
                let sound = self.shared.trouble().is_none() && self.is_quiet();
                self.stop_waits();
                return if finalize && sound { self.link.close().map(|()| true) } else { Ok(false) };
            }
            let nap = idle.next(self.moves(), self.expects());
            if nap.is_zero() {
                std::thread::yield_now();
            } else {
                // A command that came since the last look has unparked this thread: then this returns at once.
                std::thread::park_timeout(nap);
            }
        }
    }

    /// Whether the link has finished with everything.
    fn is_quiet(&self) -> bool {
        self.underway.outgoing.is_empty() && self.underway.incoming.is_empty()
    }

    /// Whether a payload is on its way: one that comes in, or one that its receiver has come to.
    fn moves(&self) -> bool {
        let wanted = |outgoing: &Outgoing<L::Ongoing>| match (&outgoing.held, outgoing.slot) {
            (Held::Message(_), _) => false,
            (_, None) => true,
            (_, Some(slot)) => self.active.get(&slot).is_none_or(|active| !active.missing.contains(&outgoing.to)),
        };
        !self.underway.incoming.is_empty() || self.underway.outgoing.iter().any(wanted)
    }

    /// Whether something is expected of other ranks.
    fn expects(&self) -> bool {
        !self.active.is_empty() || !self.reads.is_empty() || !self.underway.outgoing.is_empty()
    }

    /// Does all that can be done now; whether there was anything.
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
                if let Err(error) = self.shared.check(at_read(&read), []) {
                    end_read(Reading { read, tag: String::new(), landing: None, pieces: 0 }, Err(error));
                    return Ok(());
                }
                if self.lost[peer] {
                    self.shared.blame(peer, "it has ended, and what it had published with it");
                    let error = self.shared.stopped(at_read(&read));
                    end_read(Reading { read, tag: String::new(), landing: None, pieces: 0 }, Err(error));
                    return Ok(());
                }
                self.reads.insert(id, Reading { read, tag: String::new(), landing: None, pieces: 0 });
                self.say(peer, &Message::Read { id, window, key })?;
            }
            Command::Serve { to, id, served } => {
                let answer = match served {
                    Served::Gone => Answer::Gone,
                    Served::Left => Answer::Left,
                    Served::Failed(reason) => Answer::Failed(reason),
                    Served::Ready { tag, bytes } => return self.send_exposed(to, id, tag, bytes),
                };
                self.say(to, &Message::Seen { id, answer })?;
            }
            Command::Abort => {
                if let Some(trouble) = self.shared.trouble()
                    && !std::mem::replace(&mut self.aborted, true)
                {
                    self.say_all(&Message::Abort(trouble))?;
                }
                self.stop_waits();
            }
            Command::Leave => {
                self.say_all(&Message::Bye)?;
                self.shared.leave(self.shared.rank());
                // The serving thread lives until this one has ended.
                let _ = self.shared.jobs.send(Job::Left);
            }
            Command::Done => {
                self.say_all(&Message::Done)?;
                self.shared.note_done(self.shared.rank());
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
                    false => self.early.entry(slot).or_default().push(early),
                }
            }
            Message::Read { id, window, key } => {
                let _ = self.shared.jobs.send(Job::Asked(Asked { from, id, window, key }));
            }
            Message::Seen { id, answer } => self.see(id, answer)?,
            Message::Abort(trouble) => {
                // What this rank was in is written down before it is ended by the news.
                self.shared.note(trouble);
                self.aborted = true;
                self.stop_waits();
            }
            Message::Done => self.shared.note_done(from),
            Message::Bye => {
                self.shared.leave(from);
                let waiting: Vec<Slot> =
                    self.active.iter().filter(|(_, of)| of.missing.contains(&from)).map(|(slot, _)| *slot).collect();
                for slot in waiting {
                    let active = self.active.remove(&slot).expect("the slot was just found");
                    let error = self.shared.check(at(&active.exchange), [from]);
                    end_exchange(active.exchange, error);
                }
            }
        }
        Ok(())
    }

    /// The connection to a rank has ended. After its goodbye that is what was to come, unless it owes this rank something.
    fn lose(&mut self, peer: usize, reason: &str) {
        self.lost[peer] = true;
        // It says nothing more.
        self.shared.note_done(peer);
        let owes = self.reads.values().any(|reading| reading.read.peer == peer)
            || self.active.values().any(|active| active.receiving.contains_key(&peer));
        if owes || !self.shared.has_left(peer) {
            self.shared.blame(peer, reason);
        }
    }

    /// Announces an exchange, and takes what has been announced for it.
    fn begin(&mut self, exchange: Exchange) -> Result<(), LinkError> {
        let slot = exchange.slot;
        let early = self.early.remove(&slot).unwrap_or_default();
        let missing: Vec<usize> = exchange.receives.iter().map(|receive| receive.from).collect();
        let absent = missing.iter().copied().filter(|&peer| early.iter().all(|early| early.from != peer));
        if let Err(error) = self.shared.check(at(&exchange), absent) {
            end_exchange(exchange, Err(error));
            return Ok(());
        }
        let mut sending = 0;
        for SendTo { to, bytes } in &exchange.sends {
            let payload = &exchange.input.as_bytes()[bytes.clone()];
            let (announced, tag) = self.announce_payload(payload);
            self.say(*to, &Message::Arrived { slot, op: exchange.op.clone(), payload: announced })?;
            if let Some(tag) = tag {
                let input = exchange.input.clone();
                sending += self.send_payload(*to, tag, payload, Some(slot), || Held::Input(input.clone()))?;
            }
        }
        let sending = if exchange.until_sent { sending } else { 0 };
        self.active.insert(slot, Active { exchange, missing, receiving: HashMap::new(), sending });
        for early in early {
            self.meet(slot, early)?;
        }
        self.end_if_complete(slot);
        Ok(())
    }

    /// Compares what another rank has announced with what this one is in, and takes its payload.
    fn meet(&mut self, slot: Slot, early: Early) -> Result<(), LinkError> {
        // An early announcement that did not match has ended the exchange.
        let Some(active) = self.active.get_mut(&slot) else { return Ok(()) };
        let Early { from, op, payload } = early;
        let exchange = &active.exchange;
        let receive = exchange.receives.iter().find(|receive| receive.from == from);
        let expected = receive.map_or(0, |receive| receive.bytes.len());
        if op != exchange.op || receive.is_none() || payload.bytes() != expected {
            let other_op = if op == exchange.op { format!("{op}, of {} bytes here", payload.bytes()) } else { op };
            let error = CommError::Mismatch {
                group: exchange.group.to_string(),
                seq: slot.1,
                rank: self.shared.rank(),
                op: exchange.op.clone(),
                other_rank: from,
                other_op,
            };
            self.shared.fail(&error.to_string(), Some(&error));
            let active = self.active.remove(&slot).expect("it was just found");
            end_exchange(active.exchange, self.shared.check(At { group: "", seq: slot.1, op: "" }, []));
            return Ok(());
        }
        let ReceiveFrom { bytes, .. } = receive.expect("checked above");
        let (landing, bytes) = (exchange.landing.clone(), bytes.clone());
        active.missing.retain(|&peer| peer != from);
        exchange.entry.arrived(from, matches!(payload, Payload::Follows { .. }));
        match payload {
            // SAFETY: this rank's part of the landing is this announcement's alone, and comes once.
            Payload::Inline(inline) => unsafe { landing.fill(bytes.start, &inline) },
            Payload::Follows { tag, .. } => {
                let pieces = self.receive_payload(from, tag, &landing, bytes, For::Exchange(slot, from))?;
                let active = self.active.get_mut(&slot).expect("posting receives ends no exchange");
                active.receiving.insert(from, pieces);
            }
        }
        // Who waits for the exchange is the only one to hold its memory then.
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
            end_exchange(active.exchange, Ok(()));
        }
    }

    /// Takes an owner's answer.
    fn see(&mut self, id: u64, answer: Answer) -> Result<(), LinkError> {
        // Of a read that failed in the meantime: its payload stays where it is.
        let Some(reading) = self.reads.get_mut(&id) else { return Ok(()) };
        let read = &reading.read;
        let (peer, seq, rank) = (read.peer, read.key.version, self.shared.rank());
        let error = match answer {
            Answer::Ready { tag, payload } => {
                read.entry.arrived(peer, true);
                reading.tag = tag;
                let size = payload.bytes();
                let (landing, range) = match &read.into {
                    Some((landing, range)) if range.len() == size => (landing.clone(), range.clone()),
                    Some((_, range)) => {
                        let error = CommError::Mismatch {
                            group: "window".into(),
                            seq,
                            rank,
                            op: format!("{} of {} bytes", read.op, range.len()),
                            other_rank: peer,
                            other_op: format!("published {} of {size} bytes there", reading.tag),
                        };
                        self.end_read(id, Err(error));
                        if let Payload::Follows { tag, .. } = payload {
                            // Its owner is sending it, and ends only when it has come somewhere.
                            let landing = Arc::new(Landing::new(DType::U8, size));
                            self.receive_payload(peer, tag, &landing, 0..size, For::Nobody)?;
                        }
                        return Ok(());
                    }
                    None => {
                        let landing = Arc::new(Landing::new(DType::U8, size));
                        reading.landing = Some(landing.clone());
                        (landing, 0..size)
                    }
                };
                match payload {
                    // SAFETY: the range is this read's alone.
                    Payload::Inline(bytes) => unsafe { landing.fill(range.start, &bytes) },
                    Payload::Follows { tag, .. } => {
                        let pieces = self.receive_payload(peer, tag, &landing, range, For::Read(id))?;
                        if let Some(reading) = self.reads.get_mut(&id) {
                            reading.pieces = pieces;
                        }
                        return Ok(());
                    }
                }
                drop(landing);
                self.end_read(id, Ok(()));
                return Ok(());
            }
            Answer::Gone => CommError::Gone { rank, what: read.what.clone(), peer },
            Answer::Left => {
                let op = read.op.clone();
                CommError::PeerLeft { group: "window".into(), seq, rank, op, peer }
            }
            Answer::Failed(reason) => {
                let op = read.op.clone();
                CommError::PeerFailed { group: "window".into(), seq, rank, op, peer, reason: reason.into() }
            }
        };
        self.end_read(id, Err(error));
        Ok(())
    }

    fn end_read(&mut self, id: u64, outcome: Result<(), CommError>) {
        if let Some(reading) = self.reads.remove(&id) {
            end_read(reading, outcome);
        }
    }

    /// Ends every wait of this rank with the run's trouble.
    fn stop_waits(&mut self) {
        for (_, active) in self.active.drain() {
            let error = Err(self.shared.stopped(at(&active.exchange)));
            end_exchange(active.exchange, error);
        }
        for (_, reading) in self.reads.drain() {
            let error = Err(self.shared.stopped(at_read(&reading.read)));
            end_read(reading, error);
        }
    }

    /// Takes what the link has finished with.
    fn test(&mut self) -> Result<bool, LinkError> {
        let mut busy = false;
        let mut at = 0;
        while at < self.underway.outgoing.len() {
            if self.link.test(&mut self.underway.outgoing[at].ongoing)?.is_some() {
                let Outgoing { held, slot, .. } = self.underway.outgoing.swap_remove(at);
                match held {
                    Held::Exposed(exposed) => dispose(&self.shared.jobs, exposed),
                    held => drop(held),
                }
                if let Some(slot) = slot
                    && let Some(active) = self.active.get_mut(&slot)
                    && active.sending > 0
                {
                    active.sending -= 1;
                    self.end_if_complete(slot);
                }
                busy = true;
            } else {
                at += 1;
            }
        }
        let mut at = 0;
        while at < self.underway.incoming.len() {
            match self.link.test(&mut self.underway.incoming[at].ongoing)? {
                Some(bytes) => {
                    let Incoming { bytes: expected, landing, purpose, .. } = self.underway.incoming.swap_remove(at);
                    drop(landing);
                    if bytes != expected {
                        let reason = format!("{bytes} bytes came where {expected} were announced");
                        self.shared.fail(&reason, None);
                        return Ok(true);
                    }
                    self.landed(purpose);
                    busy = true;
                }
                None => at += 1,
            }
        }
        Ok(busy)
    }

    /// A piece has come.
    fn landed(&mut self, purpose: For) {
        match purpose {
            For::Exchange(slot, from) => {
                // An exchange that was ended has nobody who waits for the piece.
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
                let Some(reading) = self.reads.get_mut(&id) else { return };
                reading.pieces -= 1;
                if reading.pieces == 0 {
                    self.end_read(id, Ok(()));
                }
            }
            For::Nobody => {}
        }
    }
}

fn at(exchange: &Exchange) -> At<'_> {
    At { group: &exchange.group, seq: exchange.slot.1, op: &exchange.op }
}

fn at_read(read: &Read) -> At<'_> {
    At { group: "window", seq: read.key.version, op: &read.op }
}

/// Gives the exchange's result to whoever waits for it, after this thread's hold of its memory.
fn end_exchange(exchange: Exchange, outcome: Result<(), CommError>) {
    let Exchange { reply, landing, input, .. } = exchange;
    drop((landing, input));
    // Nobody listens any more when the wait has passed its deadline.
    let _ = reply.send(outcome);
}

fn end_read(reading: Reading, outcome: Result<(), CommError>) {
    let Reading { read: Read { reply, into, .. }, tag, landing, .. } = reading;
    drop(into);
    let _ = reply.send(outcome.map(|()| Got { tag, bytes: landing }));
}
