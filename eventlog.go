package provisioning

import (
	"context"
	"log/slog"
	"slices"
)

// LogEvents returns a hook for [Config.OnEvent] that logs every event. The
// message is the name of its kind. Nil means slog.Default().
//
// Levels: a fault is an error. A failed attempt, a step given up and a refused
// update are warnings. Info tells the life of the nodes: attempts begun, ready,
// deleted, destroyed and reaped, accepted updates, pauses, and operations that
// failed.
// All else is debug: passes, dispatches, stages, and observations, applied or
// not. An event below the level of the handler costs one question and no
// allocation.
//
// Keys, each there only where it says something:
//
//	node          the slot, as in w-3
//	attempt       the number of the attempt
//	operation     the name of the operation
//	operation_id  attempt and sequence, as in 7/2
//	rule          why it was dispatched, as in R12 create-lease
//	observation   what was observed, as in OperationCompleted
//	class         how an operation failed, if it did
//	expired       true: its deadline came before its result
//	took          a duration: see [Event]
//	retry_after   the least wait the backend asked for
//	lease         the machine that a create returned
//	endpoint      where a machine answers, as host:port
//	session       the bootstrap session
//	swactor       the agent that joined
//	bootstrap     the stage that a bootstrap reports
//	from          the stage that a node leaves
//	to            the stage that it reaches
//	generation    of the shape that was offered, or that a pass worked on
//	reason        why an attempt failed or is deleted, or an observation was not applied
//	error         what the backend, the bootstrap, the executor or the library said
//	at            the instant of the event in the driver's clock
//
// Specs are not logged: nothing of boot commands, environment, arguments and
// tokens. The texts under reason and error come from the backend as they are,
// so keep secrets out of its errors.
func LogEvents(logger *slog.Logger) func(Event) {
	if logger == nil {
		logger = slog.Default()
	}
	return func(e Event) {
		level := e.level()
		if logger.Enabled(context.Background(), level) {
			logger.LogAttrs(context.Background(), level, e.Kind.String(), e.attrs()...)
		}
	}
}

// level is what LogEvents documents.
func (e *Event) level() slog.Level {
	switch e.Kind {
	case EventFault:
		return slog.LevelError
	case EventAttemptFailed, EventGivenUp, EventUpdateRefused:
		return slog.LevelWarn
	case EventAttemptStarted, EventReady, EventDeleting, EventDestroyed, EventReaped, EventUpdateAccepted,
		EventPaused, EventResumed:
		return slog.LevelInfo
	case EventFold:
		if e.Class != ClassNone {
			return slog.LevelInfo
		}
	}
	return slog.LevelDebug
}

// attrs is what LogEvents documents.
func (e *Event) attrs() []slog.Attr {
	attrs := make([]slog.Attr, 0, 16)
	add := func(is bool, a slog.Attr) {
		if is {
			attrs = append(attrs, a)
		}
	}
	text := func(key, value string) { add(value != "", slog.String(key, value)) }

	text("node", string(e.Node))
	add(e.Attempt != 0, slog.Uint64("attempt", uint64(e.Attempt)))
	if e.Operation != NoOperation {
		text("operation", e.Operation.String())
		add(e.OperationID != OperationID{}, slog.String("operation_id", e.OperationID.String()))
	}
	add(e.Rule != Rule{}, slog.String("rule", e.Rule.String()))
	if o := e.Observation; o != nil {
		text("observation", o.Kind.String())
		add(e.Class != ClassNone, slog.String("class", e.Class.String()))
		add(e.Expired, slog.Bool("expired", true))
		add(o.Completion.RetryAfter != 0, slog.Duration("retry_after", o.Completion.RetryAfter))
		text("lease", string(o.Completion.Lease))
		if o.Completion.Endpoint != nil {
			text("endpoint", o.Completion.Endpoint.String())
		}
		text("session", string(o.Session)+string(o.Completion.Session)) // one of them
		text("swactor", string(o.Swactor))
		add(o.Stage != NoBootstrapStage, slog.String("bootstrap", o.Stage.String()))
		text("error", o.Completion.Message+o.Reason) // one of them
	}
	add(e.Took != 0, slog.Duration("took", e.Took))
	if e.Kind == EventStage {
		text("from", e.From.String())
		text("to", e.To.String())
	}
	add(e.Generation != 0, slog.Uint64("generation", e.Generation))
	text("reason", e.Reason)
	if e.Err != nil {
		text("error", e.Err.Error())
	}
	add(!e.At.IsZero(), slog.Time("at", e.At))
	return attrs
}

// JoinEvents returns a hook for [Config.OnEvent] that calls each of hooks in
// turn, also if one of them panics. Nil ones are left out; if all are, it is nil
// and costs nothing.
func JoinEvents(hooks ...func(Event)) func(Event) {
	var joined func(Event)
	for _, hook := range slices.Backward(hooks) {
		switch rest := joined; {
		case hook == nil:
		case rest == nil:
			joined = hook
		default:
			joined = func(e Event) {
				defer rest(e)
				hook(e)
			}
		}
	}
	return joined
}
