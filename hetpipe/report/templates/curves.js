// Draws the figures of the class "curves" with uPlot. Each holds its data as JSON; hetpipe/report/charts.py says
// what is in it. Of a line with a band uPlot gets three series: the mean, and the edges of the band, which are not seen.
"use strict";

(() => {
  const HEIGHT = 280;
  const FONT = "12px ui-sans-serif, system-ui, sans-serif";

  const numbers = (digits) => new Intl.NumberFormat("en", { useGrouping: false, ...digits });
  const tick = numbers({ maximumSignificantDigits: 12 });
  const measured = numbers({ minimumSignificantDigits: 4, maximumSignificantDigits: 4 });

  // A canvas knows no variables of the style sheet: they are read whenever something is drawn.
  const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

  // Whole numbers are marked at whole numbers only.
  const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];

  const axis = (label, size, space) => ({
    label,
    size,
    space,
    labelSize: 20,
    font: FONT,
    labelFont: FONT,
    stroke: () => colour("--faint"),
    grid: { stroke: () => colour("--rule"), width: 1 },
    ticks: { show: false },
    values: (_, splits) => splits.map((split) => (split === null ? "" : tick.format(split))),
  });

  const edge = () => ({ class: "edge", width: 0, points: { show: false }, values: () => null });

  // Up to the next number of one digit; uPlot's own range would go on to the next power of ten.
  const logRange = (_, low, high) => {
    if (low === null) return [low, high];
    const power = 10 ** Math.floor(Math.log10(high));
    return [uPlot.rangeLog(low, high, 10, false)[0], Math.ceil(high / power) * power];
  };

  // Where a line has no value at a place of another one, uPlot goes straight on, and points at the nearest value.
  const joined = (chart) =>
    uPlot.join(chart.lines.map(({ x, mean, most, least }) => (most ? [x, mean, most, least] : [x, mean])));

  // What has to be drawn anew where it changes.
  const frame = ({ x, y, log, lines }) => JSON.stringify([x, y, log, lines.map((line) => [line.name, !!line.most])]);

  function draw(figure) {
    let chart = JSON.parse(figure.querySelector("script").textContent);
    let data = joined(chart);
    const hasBands = chart.lines.some((line) => line.most);
    const decimals = data[0].every(Number.isInteger) ? 0 : 1;
    const place = numbers({ minimumFractionDigits: decimals, maximumFractionDigits: decimals });

    // What the legend tells of a line at a place; at the line's end while nothing is pointed at.
    const label = (index, at) => {
      const line = chart.lines[index];
      const own = at === null ? line.x.length - 1 : line.x.indexOf(data[0][at]);
      const value = (column) => (chart.steps ? tick : measured).format(column[own]);
      const mean = { [chart.x]: place.format(line.x[own]), [hasBands ? "mean" : "value"]: value(line.mean) };
      return hasBands ? { ...mean, least: value(line.least ?? line.mean), most: value(line.most ?? line.mean) } : mean;
    };

    const series = [{}];
    const bands = [];
    const lineOf = [null]; // by series
    const meanOf = [0]; // by series
    for (const [index, line] of chart.lines.entries()) {
      const mean = series.length;
      const ink = () => colour(line.colour);
      series.push({
        label: line.name,
        stroke: ink,
        width: 2,
        ...(chart.steps && { paths: uPlot.paths.stepped({ align: 1 }) }),
        points: { size: 5, width: 0, fill: ink },
        values: (_, __, at) => label(index, at),
      });
      if (line.most) {
        series.push(edge(), edge());
        bands.push({ series: [mean + 1, mean + 2], fill: () => `color-mix(in srgb, ${ink()} 16%, transparent)` });
      }
      while (meanOf.length < series.length) {
        lineOf.push(line);
        meanOf.push(mean);
      }
    }

    // The legend shows and hides a mean; the edges follow.
    const follow = (plot) =>
      meanOf.forEach((mean, index) => {
        const { show } = plot.series[mean];
        if (plot.series[index].show !== show) plot.setSeries(index, { show });
      });

    const css = (_, index) => `var(${lineOf[index].colour})`;
    const fromZero = (_, low, high) => [low === data[0][0] ? Math.min(0, low) : low, high];
    const holder = figure.querySelector(".plot");
    const size = () => ({ width: holder.clientWidth, height: HEIGHT });
    const plot = new uPlot(
      {
        ...size(),
        series,
        bands,
        scales: { x: { time: false, range: fromZero }, y: chart.log ? { distr: 3, range: logRange } : {} },
        axes: [axis(chart.x, 30, 50), { ...axis(chart.y, 52, 24), ...(chart.steps && { incrs: WHOLE }) }],
        cursor: {
          sync: { key: chart.x },
          points: { size: (_, index) => (meanOf[index] === index ? 8 : 0), fill: css },
        },
        legend: { markers: { width: 0, fill: css } },
        hooks: { setSeries: [follow] },
      },
      data,
      holder,
    );
    new ResizeObserver(() => plot.setSize(size())).observe(holder);
    plots.add(plot);

    // New data of the same lines: what is hidden stays so, and what is looked at closely, too.
    figure.accepts = (text) => frame(JSON.parse(text)) === frame(chart);
    figure.update = (text) => {
      const { min, max } = plot.scales.x;
      const isZoomed = max < data[0].at(-1) || (min > data[0][0] && min > 0);
      chart = JSON.parse(text);
      data = joined(chart);
      plot.setData(data, !isZoomed);
      if (isZoomed) plot.redraw();
    };
  }

  const plots = new Set();
  window.drawCurves = (root) => {
    for (const plot of plots) {
      if (plot.root.isConnected) continue;
      plot.destroy();
      plots.delete(plot);
    }
    root.querySelectorAll("figure.curves").forEach(draw);
  };
  window.drawCurves(document);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const plot of plots) plot.redraw(false);
  });
})();
