package provisioning_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// opLogger writes what matters, without the times of this run.
func opLogger() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "at" {
			return slog.Attr{}
		}
		return a
	}}))
}

// What does a log of the cluster say?
func ExampleLogEvents() {
	fake := fakebackend.New(fakebackend.Config{Inline: true, Start: noon})
	fake.Script("worker-0", provisioning.CreateLease, fakebackend.Capacity())
	driver, drive := newCluster(fake, provisioning.LogEvents(opLogger()))
	drive(noon)
	now, _ := driver.RequeueAt()
	drive(now)

	// Output:
	// level=INFO msg=AttemptStarted node=worker-0 attempt=1
	// level=INFO msg=Fold node=worker-0 attempt=1 operation=CreateLease operation_id=1/1 observation=OperationCompleted class=Definite error="fakebackend: no capacity"
	// level=INFO msg=Ready node=worker-0 attempt=1 took=1s
}

// How is the cluster doing?
func ExampleCollector() {
	fake := fakebackend.New(fakebackend.Config{Start: noon, JoinAfter: 90 * time.Second})
	fake.Script("worker-1", provisioning.CreateLease, fakebackend.Capacity(), fakebackend.SpotLoss(time.Hour))
	work := fake.NewWork()
	var statistics provisioning.Collector
	host, err := provisioning.NewHost(provisioning.HostConfig{
		Shape: workers(1, 2, "v1"), Backend: fake, Clock: work.Clock(nil), Go: work.Go,
		OnEvent: provisioning.JoinEvents(statistics.OnEvent, provisioning.LogEvents(slog.New(slog.DiscardHandler))), // yours, in earnest
	})
	check(err)
	ctx, stop := context.WithCancel(context.Background())
	fake.At(noon.Add(3*time.Hour), stop)
	fmt.Println(host.Run(ctx))

	s := statistics.Statistics(host.Status().Executor)
	create := s.Operations[provisioning.CreateLease-1]
	fmt.Println(create.Dispatched, "creates:", create.Ended[provisioning.ClassNone].Count, "succeeded,", create.InFlight(), "in flight")
	fmt.Println(s.Attempts.Started, "attempts:", s.Attempts.Failed, "failed,", s.Attempts.Ready.Count, "became ready,",
		s.Attempts.Ready.Mean().Round(time.Second), "on average")
	fmt.Println(s.Executor.RunningExpired, "calls past their deadline")

	// Output:
	// provisioning: stopped (context canceled) with 2 held: worker-0 attempt 1 holds lease lease/demo/worker-0/1; worker-1 attempt 3 holds lease lease/demo/worker-1/3
	// 4 creates: 3 succeeded, 0 in flight
	// 3 attempts: 1 failed, 3 became ready, 1m30s on average
	// 0 calls past their deadline
}

// How does one cluster rent from two providers?
func ExampleByProvider() {
	aws, gcp := fakebackend.New(fakebackend.Config{Inline: true}), fakebackend.New(fakebackend.Config{Inline: true})
	driver, drive := newCluster(provisioning.ByProvider{"aws": aws, "": gcp}, nil)
	wish := workers(2, 3, "v1")
	drive(noon)
	fmt.Println(aws.LiveTotal(), "of aws,", gcp.LiveTotal(), "of gcp")

	wish.Groups[0].Provider = "aws" // a change like any other: give back, then rent anew
	check(driver.UpdateDesired(wish))
	drive(noon)
	fmt.Println(aws.LiveTotal(), "of aws,", gcp.LiveTotal(), "of gcp")

	_, err := provisioning.NewHost(provisioning.HostConfig{Backend: provisioning.ByProvider{"gcp": gcp}, Shape: wish})
	fmt.Println(err)

	// Output:
	// 0 of aws, 1 of gcp
	// 3 of aws, 0 of gcp
	// provisioning: invalid shape: group "worker" (groups[0]) provider: is "aws", for which there is no backend; there are "gcp"
}

// The process was killed. What may still be billed?
func ExampleReplay_afterACrash() {
	var journal bytes.Buffer // what is left of it: a file
	fake := fakebackend.New(fakebackend.Config{Inline: true, Start: noon})
	fake.Script("worker-1", provisioning.CreateLease, fakebackend.DoneAmbiguous())
	crash(fake, &journal)

	report, err := provisioning.Replay(&journal)
	check(err)
	for _, slot := range report.Driver.Held() {
		fmt.Println(slot, "token", slot.Key.Token())
	}
	fmt.Println("and whatever bears the tag", provisioning.RunToken("demo"))

	// Output:
	// worker-0 attempt 1 holds lease lease/demo/worker-0/1 token kax6us4soqrgy7n4ko6hyjzrfkp
	// worker-1 attempt 2 may hold a machine: its create is unresolved token klneu3zcgs7x4f23cul3xg57pzo
	// and whatever bears the tag ktu6q632c3mrqdaamrxvwswec4w
}

// crash drives a cluster of two a little and leaves it.
func crash(fake *fakebackend.Backend, journal io.Writer) {
	driver, err := provisioning.NewClusterDriver(workers(1, 2, "v1"), provisioning.Config{Journal: journal})
	check(err)
	executor, err := provisioning.NewExecutor(fake, provisioning.ExecutorConfig{Deliver: driver.Deliver, Go: func(f func()) { f() }})
	check(err)
	_, err = driver.DriveUntilBlocked(noon, executor)
	check(err)
}

// What happened, and why? A journal answers that afterwards.
func ExampleReplay() {
	var journal bytes.Buffer // in a service: a file
	fake := fakebackend.New(fakebackend.Config{Inline: true, Start: noon})
	fake.Script("worker-0", provisioning.CreateLease, fakebackend.Capacity())
	driver, err := provisioning.NewClusterDriver(workers(1, 1, "v1"), provisioning.Config{Journal: &journal})
	check(err)
	executor, err := provisioning.NewExecutor(fake, provisioning.ExecutorConfig{
		Deliver: driver.Deliver,
		Go:      func(f func()) { f() },
	})
	check(err)
	_, err = driver.DriveUntilBlocked(noon, executor)
	check(err)
	check(driver.JournalErr())

	report, err := provisioning.Replay(&journal)
	check(err)
	fmt.Println(report.Passes, "passes, different:", report.Difference != nil)
	why, _ := report.Driver.Explain("worker-0", report.Last)
	fmt.Println(why)

	// Output:
	// 3 passes, different: false
	// worker-0: waiting 1s more after 1 failure in a row, the last: CreateLease: fakebackend: no capacity [R10 await-backoff]
}
