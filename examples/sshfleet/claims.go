package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/runs"
	"github.com/swactor/provisioning/examples/localfleet/view"
	"github.com/swactor/provisioning/examples/sshfleet/internal/hosts"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

// found is a claim on a host, or why it cannot be asked. Neither is set of a host
// that is free.
type found struct {
	host  *inventory.Host
	claim hosts.Claim
	err   error
}

// String says whose claim it is.
func (f found) String() string {
	about := f.claim.About
	if !f.known() {
		return fmt.Sprintf("%s has the claim %s of nobody knows whom", f.host.Name, f.claim.Token)
	}
	return fmt.Sprintf("%s has a claim of %s, attempt %d, of run %s, since %s",
		f.host.Name, about.Node, about.Attempt, about.Run, about.Since.Local().Format(time.DateTime))
}

// known reports whether the claim says whose it is, and means it.
func (f found) known() bool {
	about := f.claim.About
	return provisioning.ExternalKey{Run: about.Run, Node: about.Node, Attempt: about.Attempt}.Token() == f.claim.Token
}

// of reports whether the claim is one of a run.
func (f found) of(run provisioning.RunID) bool { return f.known() && f.claim.About.Run == run }

// findClaims asks all hosts at the same time. The answers are in the order of the
// hosts; a host without a claim has none.
// Hosts that are used must have been: a run on record had a claim there.
func findClaims(ctx context.Context, pool *hosts.Pool, all []*inventory.Host, used map[string]bool) []found {
	answers := make([][]found, len(all))
	var asking sync.WaitGroup
	for i, h := range all {
		asking.Go(func() {
			claims, there, err := pool.List(ctx, h)
			if err == nil && !there && used[h.Name] {
				err = fmt.Errorf("sshfleet: host %s has no directory of claims in %s, where there was one: it was moved, or is not mounted", h.Name, h.Dir)
			}
			if err != nil {
				answers[i] = []found{{host: h, err: err}}
			}
			for _, claim := range claims {
				answers[i] = append(answers[i], found{host: h, claim: claim})
			}
		})
	}
	asking.Wait()
	return slices.Concat(answers...)
}

// listClaims is the command claims.
func listClaims(c *command, args []string) error {
	hostFile := c.inventory()
	if _, err := c.parse(args, 0); err != nil {
		return err
	}
	all, err := inventory.Read(*hostFile)
	if err != nil {
		return err
	}
	ctx, cancel := c.context()
	defer cancel()
	driven, records, err := ourRuns(ctx, c.dir)
	if err != nil {
		return err
	}
	pool := hosts.NewPool(hosts.Config{})
	defer pool.Close()
	answers := make(map[string][]found)
	for _, f := range findClaims(ctx, pool, all, usedHosts(records)) {
		answers[f.host.Name] = append(answers[f.host.Name], f)
	}
	var unreachable []error
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
	row := func(cells ...string) {
		cells = append(cells, make([]string, 6-len(cells))...) // else columns end there
		for i := range cells {
			cells[i] = view.Printable(cells[i])
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	row("HOST", "CLAIM", "SLOT", "ATTEMPT", "SINCE", "WHOSE")
	for _, h := range all {
		if answers[h.Name] == nil {
			row(h.Name, "none")
		}
		for _, f := range answers[h.Name] {
			if f.err != nil {
				unreachable = append(unreachable, f.err)
				row(h.Name, "unknown", "", "", "", "the host cannot be asked")
				continue
			}
			about := f.claim.About
			whose := fmt.Sprintf("nobody here remembers it; %s ends it", c.hint("release", *hostFile, h.Name, f.claim.Token))
			switch {
			case f.of(driven):
				whose = "the controller that runs here"
			case slices.ContainsFunc(records, func(r runs.Record) bool { return f.of(r.Run) }):
				whose = fmt.Sprintf("a run of here that is over; %s ends it", c.hint("drain", *hostFile))
			}
			if about.Since.IsZero() { // it does not say
				row(h.Name, string(f.claim.State), "", "", "", whose)
				continue
			}
			row(h.Name, string(f.claim.State), string(about.Node), fmt.Sprint(about.Attempt), about.Since.Local().Format(time.DateTime), whose)
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) {
		fmt.Fprintln(c.out, strings.TrimRight(line, " \n"))
	}
	return errors.Join(unreachable...)
}

// ourRuns returns the run that is driven in a directory, "" if none is, and those
// on record there.
func ourRuns(ctx context.Context, dir string) (driven provisioning.RunID, records []runs.Record, err error) {
	s, err := control.NewClient(dir).Status(ctx)
	if err != nil && !errors.Is(err, control.ErrNoController) {
		return "", nil, err
	}
	records, err = runs.Dir(dir).List()
	return provisioning.RunID(s.Run), records, err
}

// release ends a claim by hand: somebody has to know that nobody wants it.
func release(c *command, args []string) error {
	hostFile := c.inventory()
	lost := c.flags.Bool("lost", false, "the claim is not on the host any more, and you know that nothing is left of it: have the host say that it was ended")
	noCleanup := c.flags.Bool("no-clean-up", false, "leave out the clean-up command of the claim")
	rest, err := c.parse(args, 2)
	if err != nil {
		return err
	}
	name, token := rest[0], rest[1]
	all, err := inventory.Read(*hostFile)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(h *inventory.Host) bool { return h.Name == name })
	if i < 0 {
		return fmt.Errorf("sshfleet: there is no host %q in %s", name, *hostFile)
	}
	ctx, cancel := c.context()
	defer cancel()
	driven, _, err := ourRuns(ctx, c.dir)
	if err != nil {
		return err
	}
	pool := hosts.NewPool(hosts.Config{})
	defer pool.Close()
	claims, _, err := pool.List(ctx, all[i])
	if err != nil {
		return err
	}
	j := slices.IndexFunc(claims, func(claim hosts.Claim) bool { return claim.Token == token })
	if j < 0 && *lost {
		if err := pool.Bury(ctx, all[i], token); err != nil {
			return err
		}
		fmt.Fprintln(c.out, view.Printable(fmt.Sprintf("released: host %s has no claim %s, and it counts as ended", name, token)))
		return nil
	}
	if j < 0 {
		return fmt.Errorf("sshfleet: host %s has no claim %s", name, token)
	}
	f := found{host: all[i], claim: claims[j]}
	if driven != "" && f.of(driven) {
		return fmt.Errorf("sshfleet: %s, and the controller that runs here drives it", f)
	}
	if err := endClaim(ctx, pool, f, !*noCleanup); err != nil {
		return err
	}
	fmt.Fprintln(c.out, view.Printable("released: "+f.String()))
	return nil
}

// endClaim waits for a clean-up command as long as a controller would.
func endClaim(ctx context.Context, pool *hosts.Pool, f found, cleanup bool) error {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	return pool.End(ctx, f.host, f.claim.Token, cleanup)
}

// usedHosts returns the names of the hosts on which runs have had claims.
func usedHosts(records []runs.Record) map[string]bool {
	used := make(map[string]bool)
	for _, record := range records {
		for name := range record.Places {
			used[name] = true
		}
	}
	return used
}

// sweep ends the claims of all runs on record and takes those runs off it, if all
// hosts that they have used are in the inventory and all of the inventory could be
// asked, but for those that are gone for good.
func sweep(ctx context.Context, c *command, dir runs.Dir, all []*inventory.Host, gone []string) error {
	records, err := dir.List()
	if err != nil {
		return err
	}
	used := usedHosts(records)
	places := make(map[string]string)
	for _, h := range all {
		places[h.Name] = h.Place()
	}
	for _, name := range gone {
		if !used[name] && places[name] == "" {
			return fmt.Errorf("sshfleet: there is no host %q in the inventory, and no run on record has used it", name)
		}
	}
	var errs []error
	for _, record := range records {
		for _, name := range slices.Sorted(maps.Keys(record.Places)) {
			switch where, is := record.Places[name], places[name]; {
			case slices.Contains(gone, name) || where == is:
			case is == "":
				errs = append(errs, fmt.Errorf("sshfleet: run %s has used host %s at %s, which is not in this inventory", record.Run, name, where))
			default:
				errs = append(errs, fmt.Errorf("sshfleet: run %s has used host %s at %s, and in this inventory it is at %s", record.Run, name, where, is))
			}
		}
	}
	all = slices.DeleteFunc(slices.Clone(all), func(h *inventory.Host) bool { return slices.Contains(gone, h.Name) })
	pool := hosts.NewPool(hosts.Config{})
	defer pool.Close()
	for _, f := range findClaims(ctx, pool, all, used) {
		ours := f.err == nil && slices.ContainsFunc(records, func(r runs.Record) bool { return f.of(r.Run) })
		switch {
		case f.err != nil:
			errs = append(errs, f.err)
		case !ours:
			fmt.Fprintln(c.out, view.Printable(f.String()+"; it is of no run on record here and was left alone"))
		default:
			if err := endClaim(ctx, pool, f, true); err != nil {
				errs = append(errs, err)
				continue
			}
			fmt.Fprintln(c.out, view.Printable("given back: "+f.String()))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w\nsshfleet: the runs stay on record; try again when all hosts answer, or leave out with -gone what is gone for good", err)
	}
	for _, record := range records {
		if err := dir.Forget(record.Run); err != nil {
			return err
		}
	}
	left := ""
	if len(gone) > 0 {
		left = ", but for what is on " + strings.Join(gone, ", ")
	}
	fmt.Fprintln(c.out, view.Printable(fmt.Sprintf("Nothing of %s is left on the hosts%s.", cmp.Or(string(dir), "."), left)))
	return nil
}
